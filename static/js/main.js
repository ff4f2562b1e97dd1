// Starts what every page has: theme, time zone, keys, search, ages, live parts and copy buttons.
import { startAges } from "./ages.js";
import { startCopying } from "./copying.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startNotifying } from "./notify.js";
import { startSearch } from "./search.js";
import { startTheme } from "./theme.js";
import { startZone } from "./zone.js";

document.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
startTheme();
startKeys();
startZone();
startAges();
startLive();
startNotifying();
startCopying();
startSearch();

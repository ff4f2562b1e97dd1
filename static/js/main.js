// What every page has: theme, zone of times, keys, search, ages that stay fresh, live parts.
import { startAges } from "./ages.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startSearch } from "./search.js";
import { startTheme } from "./theme.js";
import { startZone } from "./zone.js";

startTheme();
startKeys();
startZone();
startAges();
startLive();
startSearch();
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // the strip of narrow screens

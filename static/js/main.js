// What every page has: theme, zone of times, keys, search, ages that stay fresh, live parts,
// buttons that copy.
import { startAges } from "./ages.js";
import { startCopying } from "./copying.js";
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
startCopying();
startSearch();
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // the strip of narrow screens

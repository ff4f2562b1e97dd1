// What every page has: theme, keys, search, ages that stay fresh, live parts.
import { startAges } from "./ages.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startSearch } from "./search.js";
import { startTheme } from "./theme.js";

startTheme();
startKeys();
startAges();
startLive();
startSearch();
document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // the strip of narrow screens

// Starts what every page has: theme, time zone, keys, search, ages, live parts and copy buttons.
import { startAges } from "./ages.js";
import { startCopying } from "./copying.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startNotifying } from "./notify.js";
import { startSearch } from "./search.js";
import { startTheme } from "./theme.js";
import { startZone } from "./zone.js";

const tab = document.querySelector(".tabs [aria-current]"); // scrollIntoView would scroll the page too
if (tab) {
  const strip = tab.parentElement;
  strip.scrollLeft = tab.offsetLeft - strip.offsetLeft + (tab.offsetWidth - strip.offsetWidth) / 2;
}
startTheme();
startKeys();
startZone();
startAges();
startLive();
startNotifying();
startCopying();
startSearch();

// What every page has: theme, keys, ages that stay fresh, live parts.
import { startAges } from "./ages.js";
import { startKeys } from "./keys.js";
import { startLive } from "./live.js";
import { startTheme } from "./theme.js";

startTheme();
startKeys();
startAges();
startLive();

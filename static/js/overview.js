// A page of figures: its charts, drawn from what the server builds, zoomed together.
import { Chart } from "./charts.js";
import { startTimeRange } from "./time-range.js";
import { keepZoom, zoom, zooms } from "./view-state.js";

const charts = [...document.querySelectorAll("[data-chart]")].map((section) => new Chart(section));
const each = (act) => charts.forEach(act);

// One zoom for all: the question is always what else happened at that time. Each is a step that "back" undoes.
const show = (range) => each((chart) => chart.zoom(range));
each((chart) => {
  chart.range = zoom();
  chart.onZoom((range) => {
    keepZoom(range);
    each((other) => other !== chart && other.zoom(range));
  });
});
addEventListener("popstate", () => show(zoom()));
document.addEventListener("zoomundo", () => {
  if (!zoom()) return;
  if (zooms()) return history.back();
  keepZoom(null);
  show(null);
});
window.addEventListener("themechange", () => each((chart) => chart.draw()));
window.addEventListener("zonechange", () => each((chart) => chart.rezone()));

// Links that change one thing of this page keep the rest of what the reader did to it.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='?']");
  if (!link) return;
  const url = new URL(link.href), now = new URL(location.href).searchParams;
  for (const name of ["hide", "table", "tz"]) {
    url.searchParams.delete(name);
    for (const value of now.getAll(name)) url.searchParams.append(name, value);
  }
  url.searchParams.delete("zoom");
  link.href = url.search || "?";
}, true);

startTimeRange();
each((chart) => chart.load());
if (zoom()) show(zoom());
let seconds = 0;
document.addEventListener("tick", (event) => {
  seconds += 1;
  each((chart) => (event.detail.now || (chart.every && seconds % chart.every === 0)) && chart.every && chart.load());
});

// The charts of a page with figures. The server builds the figures; a zoom applies to all charts.
import { Chart } from "./charts.js";
import { startTimeRange } from "./time-range.js";
import { keepZoom, zoom, zooms } from "./view-state.js";

const charts = [...document.querySelectorAll("[data-chart]")].map((section) => new Chart(section));
const each = (act) => charts.forEach(act);

// A zoom applies to all charts, because the reader looks for what else changed at that time. "Back" undoes it.
const show = (range) => each((chart) => chart.zoom(range));
each((chart) => {
  chart.range = chart.plain ? null : zoom();
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
window.addEventListener("beforeprint", () => each((chart) => chart.print()));
matchMedia("print").addEventListener("change", (event) => each((chart) => (event.matches ? chart.print() : chart.draw())));
window.addEventListener("themechange", () => each((chart) => chart.draw()));
window.addEventListener("zonechange", () => each((chart) => chart.rezone()));

// Links that change one parameter of this page keep hidden lines, open tables and the time zone.
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href^='?']");
  if (!link) return;
  const url = new URL(link.href), now = new URL(location.href).searchParams;
  for (const name of ["hide", "table", "tz"]) {
    url.searchParams.delete(name);
    for (const value of now.getAll(name)) url.searchParams.append(name, value);
  }
  url.searchParams.delete("zoom");
  link.href = (url.search || "?") + url.hash;
}, true);

startTimeRange();
if (zoom()) show(zoom());
let seconds = 0;
document.addEventListener("tick", (event) => {
  seconds += 1;
  each((chart) => (event.detail.now || (chart.every && seconds % chart.every === 0)) && chart.every && chart.load());
});

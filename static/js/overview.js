// The overview: its charts, drawn from the figures that the server builds.
import { Chart } from "./charts.js";

const charts = [...document.querySelectorAll("[data-chart]")].map((section) => new Chart(section));
const each = (act) => charts.forEach(act);

// One zoom for all: the question is always what else happened at that time.
each((chart) => chart.onZoom((range) => each((other) => other !== chart && other.zoom(range))));
document.addEventListener("zoomout", () => each((chart) => chart.zoom(null)));
window.addEventListener("themechange", () => each((chart) => chart.draw()));

each((chart) => chart.load());
let seconds = 0;
document.addEventListener("tick", (event) => {
  seconds += 1;
  each((chart) => (event.detail.now || (chart.every && seconds % chart.every === 0)) && chart.every && chart.load());
});

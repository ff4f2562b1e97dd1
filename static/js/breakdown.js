// Draws the charts of the hit-rate breakdown, and redraws them when the theme changes.
import { themed } from "./plot-theme.js";

const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false, showTips: false };
const places = [...document.querySelectorAll("[data-draw]")];

async function load(place) {
  const response = await fetch(place.dataset.draw, { headers: { Accept: "application/json" } });
  if (response.redirected) return location.reload();
  if (!response.ok) return;
  place.figure = await response.json();
  await draw(place);
}

async function draw(place) {
  if (!place.figure) return;
  const { data, layout } = place.figure;
  const scale = parseFloat(getComputedStyle(place).fontSize) / 14;
  await window.Plotly.react(place, data, themed(structuredClone(layout), place.clientWidth, "", scale), CONFIG);
}

places.forEach(load);
window.addEventListener("themechange", () => places.forEach(draw));

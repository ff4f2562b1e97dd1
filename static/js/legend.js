// A chart's legend: one button per line with its colour and dash, pressed while the line is visible.
const SVG = "http://www.w3.org/2000/svg";
const DASHES = { solid: "", dash: "6 4", dot: "2 3", dashdot: "7 3 2 3" };

export function legend(place, traces, hidden, toggle) {
  const lines = traces.map((trace) => `${trace.name}\n${trace.line.color}\n${trace.line.dash ?? ""}`).join("\n\n");
  if (place.dataset.shown !== lines) {
    place.dataset.shown = lines;
    place.replaceChildren(...traces.map((trace) => item(trace, toggle)));
  }
  for (const button of place.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.name)));
  }
}

function item(trace, toggle) {
  const button = document.createElement("button");
  button.type = "button";
  button.dataset.name = trace.name;
  button.append(swatch(trace), trace.name);
  button.addEventListener("click", () => toggle(trace.name));
  const entry = document.createElement("li");
  entry.append(button);
  return entry;
}

function swatch(trace) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("viewBox", "0 0 26 10");
  const shape = document.createElementNS(SVG, trace.meta === "band" ? "rect" : "line");
  const geometry = trace.meta === "band"
    ? { x: 2, y: 1, width: 22, height: 8, fill: trace.line.color, "fill-opacity": 0.35 }
    : { x1: 1, x2: 25, y1: 5, y2: 5, stroke: trace.line.color, "stroke-width": 2.5, "stroke-dasharray": DASHES[trace.line.dash] ?? "" };
  for (const [name, value] of Object.entries(geometry)) shape.setAttribute(name, value);
  svg.append(shape);
  return svg;
}

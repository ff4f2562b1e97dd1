// The data of a chart as a table: one column per line, the newest step first.
const ROWS = 120;
const FORMS = {
  ratio: (value) => `${(value * 100).toFixed(1)} %`,
  seconds: (value) => (value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`),
  count: (value) => value.toLocaleString("en", { maximumFractionDigits: 1 }),
};

export function table({ data, meta }, zone, requests) {
  const lines = data.filter((trace) => trace.meta === "line");
  const wrap = element("div", { className: "chart-table table-wrap", tabIndex: 0 });
  wrap.setAttribute("role", "region");
  wrap.setAttribute("aria-label", `${meta.title}, as a table`);
  const grid = element("table");
  const head = grid.createTHead().insertRow();
  head.append(element("th", { scope: "col", textContent: `From (${zone})` }));
  for (const line of lines) head.append(element("th", { scope: "col", className: "num", textContent: line.name }));
  const body = grid.createTBody();
  const steps = times(lines[0]);
  for (let step = steps.length - 1; step >= Math.max(0, steps.length - ROWS); step -= 1) {
    const row = body.insertRow();
    const at = row.appendChild(element("th", { scope: "row" }));
    at.append(element("a", { href: requests(steps[step]), title: "Requests of this time", textContent: steps[step].replace("T", " ").slice(5, 19) }));
    for (const line of lines) row.append(element("td", { className: "num", textContent: formatValue((line.customdata ?? line.y)[step], meta.unit) }));
  }
  wrap.append(grid);
  return wrap;
}

// Expands Plotly's notation for evenly spaced times: a start and a step in milliseconds.
function times(line) {
  const start = line ? Date.parse(`${line.x0}Z`) : 0;
  return (line?.y ?? []).map((_, step) => new Date(start + step * line.dx).toISOString());
}

const formatValue = (value, unit) => (value === null || value === undefined ? "\u2013" : FORMS[unit](value));

function element(name, properties = {}) {
  return Object.assign(document.createElement(name), properties);
}

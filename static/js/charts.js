// A chart: fetches its figure, draws it with Plotly.react, and keeps what the reader did to it (zoom, hidden lines,
// the table: they stand in the URL) over every refresh. A chart that is zoomed or under the pointer is not redrawn.
import { legend } from "./legend.js";
import { themed } from "./plot-theme.js";
import { table } from "./series-table.js";
import { hidden, instant, keepHidden, keepTable, stamp, tables } from "./view-state.js";
import { offset, told, zoneName } from "./zone.js";

const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };
const SETTLED_MS = 150;
const NARROW = matchMedia("(width < 40rem), (pointer: coarse)");

export class Chart {
  constructor(section) {
    this.section = section;
    this.part = (name) => section.querySelector(`[data-${name}]`);
    this.plot = this.part("plot");
    this.every = Number(section.dataset.every);
    this.slug = section.dataset.chart;
    this.hidden = hidden(this.slug);
    this.answer = null; // the figure as the server told it, in UTC
    this.figure = null; // the same in the reader's zone
    this.range = null; // what the reader zoomed to, in UTC
    this.zoomed = () => {};
    this.listen();
  }

  listen() {
    this.note("Loading");
    this.part("zoom").hidden = false;
    this.part("zoom-in").addEventListener("click", () => this.zoomTo(this.middle()));
    this.part("zoom-out").addEventListener("click", () => document.dispatchEvent(new Event("zoomundo")));
    this.part("zoom-use").addEventListener("click", () => this.useRange());
    this.part("table-toggle").setAttribute("role", "button");
    this.showTable(tables().has(this.slug));
    this.part("table-toggle").addEventListener("click", (event) => this.toggleTable(event));
    new ResizeObserver(() => {
      clearTimeout(this.resizing);
      this.resizing = setTimeout(() => this.fit(), SETTLED_MS);
    }).observe(this.plot);
    this.plot.addEventListener("pointerenter", () => (this.pointed = true));
    this.plot.addEventListener("pointerleave", () => (this.pointed = false));
  }

  onZoom(listener) {
    this.zoomed = listener;
  }

  async load() {
    if (this.loading || (this.figure && (this.pointed || this.range || !this.near()))) return;
    this.loading = true;
    try {
      const answer = await fetch(this.section.dataset.src, { headers: { Accept: "application/json" } });
      if (answer.redirected) return location.reload();
      if (!answer.ok) return this.failed(`the server answered with status ${answer.status}`);
      this.answer = await answer.json();
      this.toldAt = Date.now();
      await this.rezone();
      this.stale("");
    } catch (error) {
      this.failed("the control plane cannot be reached");
      document.dispatchEvent(new CustomEvent("livestate", { detail: "error" }));
    } finally {
      this.loading = false;
    }
  }

  // The figure on the wall clock of the reader's zone: one clock for the whole chart, that of its end.
  async rezone() {
    if (!this.answer) return;
    const end = instant(this.answer.layout.xaxis.range[1]);
    this.offset = offset(end);
    this.zone = zoneName(end);
    this.figure = onClock(this.answer, (at) => this.toClock(at));
    await this.draw();
  }

  toClock(at) {
    return this.offset ? stamp(instant(at) + this.offset) : at;
  }

  toUtc(at) {
    return this.offset ? stamp(instant(at) - this.offset) : at;
  }

  // Whether it is on the screen, or nearly: what nobody looks at is not asked for again.
  near() {
    const { top, bottom } = this.section.getBoundingClientRect();
    return bottom > -200 && top < innerHeight + 200;
  }

  // Its panel grew or shrank: a neighbour's legend came, the window was resized.
  fit() {
    const drawn = this.plot._fullLayout;
    if (drawn && (drawn.width !== this.plot.clientWidth || drawn.height !== this.plot.clientHeight)) this.draw();
  }

  async draw() {
    if (!this.figure) return;
    const { data, layout, meta } = this.figure;
    const shown = data.map((trace) => ({ ...trace, visible: !this.hidden.has(trace.name) }));
    const drawn = themed(structuredClone(layout), this.plot.clientWidth - layout.margin.l - layout.margin.r, this.zone);
    if (this.range) drawn.xaxis.range = this.range.map((at) => this.toClock(at));
    if (NARROW.matches) drawn.dragmode = false;
    drawn.xaxis.nticks = Math.max(4, Math.floor(this.plot.clientWidth / 90));
    drawn.xaxis.tickangle = 0;
    const first = !this.plot.classList.contains("js-plotly-plot");
    legend(this.part("legend"), data.filter((trace) => trace.meta === "line" || trace.meta === "band"), this.hidden, (name) => this.toggle(name));
    this.part("notes").hidden = !meta.notes.length;
    this.part("notes").textContent = meta.notes.join(" ");
    await window.Plotly.react(this.plot, shown, drawn, CONFIG);
    if (first) this.plot.on("plotly_relayout", (change) => this.relayouted(change));
    this.note(meta.empty ? `Nothing to draw: ${meta.empty}.` : "");
    this.plot.setAttribute("aria-label", meta.sentence);
    this.fillTable();
  }

  // The others go on: each chart says for itself what it could not do.
  failed(why) {
    const next = this.every ? "The next try is in a moment." : "Reload the page to try again.";
    if (this.figure) this.stale(`Not fresh: ${why}. Shown is what was told at ${told(this.toldAt, "second")}. ${next}`);
    else this.note(`This chart's figures could not be fetched: ${why}. ${next}`);
  }

  stale(text) {
    const place = this.part("stale");
    place.hidden = !text;
    place.textContent = text;
  }

  note(text) {
    const note = this.part("note");
    note.hidden = !text;
    note.textContent = text;
  }

  toggle(name) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    keepHidden(this.slug, this.hidden);
    this.draw();
  }

  relayouted(change) {
    const from = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0];
    const to = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (from && to && !this.settled) this.zoomTo([this.toUtc(from), this.toUtc(to)]);
  }

  zoomTo(range) {
    this.zoom(range);
    this.zoomed(range);
  }

  async zoom(range) {
    this.range = range;
    this.part("zoom-out").hidden = this.part("zoom-use").hidden = !range;
    if (!this.figure) return;
    this.settled = true; // our own change, not the reader's
    await window.Plotly.relayout(this.plot, { "xaxis.range": range?.map((at) => this.toClock(at)) ?? [...this.figure.layout.xaxis.range] });
    this.settled = false;
    if (!range) this.load();
  }

  middle() {
    const [from, to] = (this.range ?? this.answer.layout.xaxis.range).map(instant);
    const quarter = (to - from) / 4;
    return [stamp(from + quarter), stamp(to - quarter)];
  }

  useRange() {
    const url = new URL(location.href);
    for (const name of ["range", "zoom"]) url.searchParams.delete(name);
    url.searchParams.set("from", stamp(instant(this.range[0])));
    url.searchParams.set("to", stamp(instant(this.range[1])));
    location.assign(url);
  }

  toggleTable(event) {
    event.preventDefault();
    this.showTable(this.part("table").hidden);
    keepTable(this.slug, !this.part("table").hidden);
  }

  showTable(open) {
    this.part("table").hidden = !open;
    this.part("table-toggle").setAttribute("aria-expanded", String(open));
    this.fillTable();
  }

  fillTable() {
    const place = this.part("table");
    if (!place.hidden && this.figure) place.replaceChildren(table(this.figure, this.zone));
  }
}

// A figure with another time wherever it has one.
function onClock({ data, layout, meta }, clock) {
  const moved = (one, names) => ({ ...one, ...Object.fromEntries(names.filter((name) => name in one).map((name) => [name, clock(one[name])])) });
  return {
    meta,
    data: data.map((trace) => ({ ...moved(trace, ["x0"]), ...(trace.x && { x: trace.x.map((at) => at && clock(at)) }) })),
    layout: {
      ...layout,
      xaxis: { ...layout.xaxis, range: layout.xaxis.range.map(clock) },
      shapes: (layout.shapes ?? []).map((one) => moved(one, ["x0", "x1"])),
      annotations: (layout.annotations ?? []).map((one) => moved(one, ["x"])),
    },
  };
}

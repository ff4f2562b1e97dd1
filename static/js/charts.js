// A chart: fetches its figure, draws it with Plotly.react, and keeps what the reader did to it (zoom, hidden lines,
// the table: they stand in the URL) over every refresh. A chart that is zoomed or under the pointer is not redrawn.
import { legend } from "./legend.js";
import { themed } from "./plot-theme.js";
import { table } from "./series-table.js";
import { hidden, instant, keepHidden, keepTable, stamp, tables } from "./view-state.js";

const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false, showTips: false };
const NARROW = matchMedia("(width < 40rem), (pointer: coarse)");

export class Chart {
  constructor(section) {
    this.section = section;
    this.part = (name) => section.querySelector(`[data-${name}]`);
    this.plot = this.part("plot");
    this.every = Number(section.dataset.every);
    this.slug = section.dataset.chart;
    this.hidden = hidden(this.slug);
    this.figure = null;
    this.range = null; // what the reader zoomed to
    this.zoomed = () => {};
    this.listen();
  }

  listen() {
    this.part("zoom").hidden = false;
    this.part("zoom-in").addEventListener("click", () => this.zoomTo(this.middle()));
    this.part("zoom-out").addEventListener("click", () => document.dispatchEvent(new Event("zoomundo")));
    this.part("zoom-use").addEventListener("click", () => this.useRange());
    this.part("table-toggle").setAttribute("role", "button");
    this.showTable(tables().has(this.slug));
    this.part("table-toggle").addEventListener("click", (event) => this.toggleTable(event));
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
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      this.figure = await answer.json();
      await this.draw();
    } catch (error) {
      if (!this.figure) this.note("The figures could not be fetched; the next try is in a moment.");
      document.dispatchEvent(new CustomEvent("livestate", { detail: "error" }));
    } finally {
      this.loading = false;
    }
  }

  // Whether it is on the screen, or nearly: what nobody looks at is not asked for again.
  near() {
    const { top, bottom } = this.section.getBoundingClientRect();
    return bottom > -200 && top < innerHeight + 200;
  }

  async draw() {
    if (!this.figure) return;
    const { data, layout, meta } = this.figure;
    const shown = data.map((trace) => ({ ...trace, visible: !this.hidden.has(trace.name) }));
    const drawn = themed(structuredClone(layout), this.plot.clientWidth - layout.margin.l - layout.margin.r);
    if (this.range) drawn.xaxis.range = [...this.range];
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
    if (from && to && !this.settled) this.zoomTo([from, to]);
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
    await window.Plotly.relayout(this.plot, { "xaxis.range": [...(range ?? this.figure.layout.xaxis.range)] });
    this.settled = false;
    if (!range) this.load();
  }

  middle() {
    const [from, to] = (this.range ?? this.figure.layout.xaxis.range).map(instant);
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
    if (!place.hidden && this.figure) place.replaceChildren(table(this.figure));
  }
}

// Fetches and draws a chart with Plotly.react. Zoom, hidden lines and the open table are kept in the URL and survive a
// refresh. A chart that is zoomed or under the pointer is not refreshed.
import { legend } from "./legend.js";
import { themed } from "./plot-theme.js";
import { table } from "./series-table.js";
import { hidden, instant, keepHidden, keepTable, stamp, tables } from "./view-state.js";
import { offset, formatTime, zoneName } from "./zone.js";

const CONFIG = { displayModeBar: false, responsive: false, scrollZoom: false, doubleClick: false, showTips: false };
const SETTLED_MS = 150;
const HEADROOM = 1.2; // so that marks and names of policies cover no peak
const LOW_PX = 150; // a lower plot has no room for names of policies; the one above it has them
let library; // of Plotly, loaded with the first chart
const NARROW = matchMedia("(width < 40rem), (pointer: coarse)");

// Loads Plotly after the page's text; it is most of the page's weight.
function loadPlotly(src) {
  library ??= new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src, onload: resolve, onerror: () => { library = undefined; script.remove(); reject(new Error(src)); } });
    document.head.append(script);
  });
  return library;
}

export class Chart {
  constructor(section) {
    this.section = section;
    this.part = (name) => section.querySelector(`[data-${name}]`);
    this.plot = this.part("plot");
    this.every = Number(section.dataset.every);
    this.slug = section.dataset.chart;
    this.hidden = hidden(this.slug);
    this.response = null; // the figure from the server, in UTC
    this.figure = null; // the same in the reader's time zone
    this.range = null; // the zoomed range, in UTC
    this.near = false; // whether it is visible or close to it; others are neither loaded nor refreshed
    this.zoomed = () => {};
    this.plain = !this.part("zoom"); // on a wall: nothing to point at or press
    this.listen();
  }

  listen() {
    this.note("Loading");
    if (!this.plain) this.listenToReader();
    new ResizeObserver(() => {
      clearTimeout(this.resizing);
      this.resizing = setTimeout(() => this.fit(), SETTLED_MS);
    }).observe(this.plot);
    new IntersectionObserver((seen) => {
      this.near = seen.at(-1).isIntersecting;
      if (!this.figure) this.load();
    }, { rootMargin: "200px" }).observe(this.section);
  }

  listenToReader() {
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

  // Printing waits for no promise: a chart that was never seen is requested synchronously.
  print() {
    if (this.figure || !window.Plotly) return this.draw();
    const request = new XMLHttpRequest();
    request.open("GET", this.section.dataset.src, false);
    try {
      request.send();
      if (request.status !== 200) throw new Error(request.statusText);
      this.response = JSON.parse(request.responseText);
    } catch {
      return this.failed("the control plane cannot be reached");
    }
    this.loadedAt = Date.now();
    this.rezone();
  }

  async load() {
    if (this.loading || !this.near || (this.figure && (this.pointed || this.range))) return;
    this.loading = true;
    try {
      const plotly = loadPlotly(this.section.parentElement.dataset.plotly);
      const response = await fetch(this.section.dataset.src, { headers: { Accept: "application/json" } });
      if (response.redirected) return location.reload();
      if (!response.ok) return this.failed(`the server responded with status ${response.status}`);
      this.response = await response.json();
      this.loadedAt = Date.now();
      await plotly;
      await this.rezone();
      this.stale("");
    } catch (error) {
      this.failed("the control plane cannot be reached");
      document.dispatchEvent(new CustomEvent("livestate", { detail: "error" }));
    } finally {
      this.loading = false;
    }
  }

  // Converts the figure to the reader's time zone, with the UTC offset at the end of the chart.
  async rezone() {
    if (!this.response) return;
    const end = instant(this.response.layout.xaxis.range[1]);
    this.offset = offset(end);
    this.zone = zoneName(end);
    this.figure = onClock(this.response, (at) => this.toClock(at));
    await this.draw();
  }

  toClock(at) {
    return this.offset ? stamp(instant(at) + this.offset) : at;
  }

  toUtc(at) {
    return this.offset ? stamp(instant(at) - this.offset) : at;
  }

  // Redraws the chart if the size of its panel changed.
  fit() {
    const drawn = this.plot._fullLayout;
    if (drawn && Math.max(Math.abs(drawn.width - this.plot.clientWidth), Math.abs(drawn.height - this.plot.clientHeight)) >= 1) this.draw();
  }

  async draw() {
    if (!this.figure) return;
    const { data, layout, meta } = this.figure;
    const shown = data.map((trace) => ({ ...trace, visible: !this.hidden.has(trace.name) }));
    const scale = parseFloat(getComputedStyle(this.section).fontSize) / 14; // a wall's letters are larger, and an enlarged page's
    const drawn = themed(structuredClone(layout), this.plot.clientWidth, this.zone, scale);
    if (this.range) drawn.xaxis.range = this.range.map((at) => this.toClock(at));
    const top = Math.max(0, ...shown.filter((trace) => trace.visible && trace.yaxis !== "y2").flatMap((trace) => trace.y));
    if (drawn.yaxis.rangemode === "tozero" && top > 0) drawn.yaxis.range = [0, top * HEADROOM];
    if (this.plot.clientHeight < LOW_PX) drawn.annotations = drawn.annotations.filter((label) => label.name !== "policy");
    if (NARROW.matches) drawn.dragmode = false;
    drawn.xaxis.nticks = Math.max(4, Math.floor(this.plot.clientWidth / 90 / scale));
    drawn.xaxis.tickangle = 0;
    const first = !this.plot.classList.contains("js-plotly-plot");
    legend(this.part("legend"), data.filter((trace) => trace.meta === "line" || trace.meta === "band"), this.hidden, (name) => this.toggle(name));
    await window.Plotly.react(this.plot, shown, drawn, { ...CONFIG, staticPlot: this.plain });
    if (first) {
      this.plot.on("plotly_relayout", (change) => this.relayouted(change));
      this.plot.on("plotly_click", ({ points }) => points.length && location.assign(this.requests(points[0].x)));
    }
    this.note(meta.empty ? `No data: ${meta.empty}.` : "");
    this.plot.setAttribute("aria-label", meta.summary);
    if (this.plain) return;
    this.part("notes").hidden = !meta.notes.length;
    this.part("notes").textContent = meta.notes.join(" ");
    this.listEvents(meta.events);
    this.fillTable();
  }

  // Lists the marked events under the chart, where they cover no line.
  listEvents(events) {
    const place = this.part("events");
    place.hidden = !events.length;
    place.querySelector("summary").textContent = events.length === 1 ? "1 event" : `${events.length} events`;
    place.querySelector("ol").replaceChildren(...events.map(([at, text]) => {
      const time = Object.assign(document.createElement("strong"), { textContent: formatTime(instant(at), "second") });
      const item = document.createElement("li");
      item.append(time, ` ${text}`);
      return item;
    }));
  }

  // Shows why this chart could not be loaded; other charts are not affected.
  failed(why) {
    const next = this.every ? "Retrying shortly." : "Reload the page to try again.";
    if (this.figure) this.stale(`Not up to date: ${why}. The chart shows data from ${formatTime(this.loadedAt, "second")}. ${next}`);
    else this.note(`The chart could not be loaded: ${why}. ${next}`);
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

  // The page with the requests of the minute, or the longer step, at a point of the chart.
  requests(at) {
    const step = Math.max(60_000, this.figure.data.find((trace) => trace.dx)?.dx ?? 0);
    const start = Math.floor(instant(this.toUtc(at)) / step) * step;
    const url = new URL(this.section.parentElement.dataset.requests, location);
    for (const name of [...url.searchParams.keys()]) if (!["pool", "group", "replica"].includes(name)) url.searchParams.delete(name);
    url.searchParams.set("from", stamp(start));
    url.searchParams.set("to", stamp(start + step));
    return url;
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
    if (this.plain) return;
    this.range = range;
    this.part("zoom-out").hidden = this.part("zoom-use").hidden = !range;
    if (!this.figure) return;
    this.settled = true; // do not handle this change as one of the reader
    await window.Plotly.relayout(this.plot, { "xaxis.range": range?.map((at) => this.toClock(at)) ?? [...this.figure.layout.xaxis.range] });
    this.settled = false;
    if (!range) this.load();
  }

  middle() {
    const [from, to] = (this.range ?? this.response.layout.xaxis.range).map(instant);
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
    if (!place.hidden && this.figure) place.replaceChildren(table(this.figure, this.zone, (at) => this.requests(at)));
  }
}

// Converts all times of a figure.
function onClock({ data, layout, meta }, clock) {
  const moved = (item, names) => ({ ...item, ...Object.fromEntries(names.filter((name) => name in item).map((name) => [name, clock(item[name])])) });
  return {
    meta,
    data: data.map((trace) => ({ ...moved(trace, ["x0"]), ...(trace.x && { x: trace.x.map((at) => at && clock(at)) }) })),
    layout: {
      ...layout,
      xaxis: { ...layout.xaxis, range: layout.xaxis.range.map(clock) },
      shapes: (layout.shapes ?? []).map((item) => moved(item, ["x0", "x1"])),
      annotations: (layout.annotations ?? []).map((item) => moved(item, ["x"])),
    },
  };
}

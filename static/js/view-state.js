// Stores zoom, hidden lines and open tables of charts in the URL. A zoom adds an entry to the browser's history, so that
// back undoes it; the others replace the current entry.
const params = () => new URL(location.href).searchParams;

export const zoom = () => {
  const [from, to] = (params().get("zoom") ?? "").split("~");
  return from && to && instant(from) < instant(to) ? [stamp(instant(from)), stamp(instant(to))] : null;
};
export const hidden = (slug) => new Set(params().getAll("hide").filter((entry) => entry.startsWith(`${slug}:`)).map((entry) => entry.slice(slug.length + 1)));
export const tables = () => new Set(params().getAll("table"));

export function keepZoom(range) {
  const url = new URL(location.href);
  url.searchParams.delete("zoom");
  if (range) url.searchParams.set("zoom", range.map((at) => stamp(instant(at))).join("~"));
  history.pushState({ zooms: zooms() + 1 }, "", url);
}

export function keepHidden(slug, names) {
  const others = params().getAll("hide").filter((entry) => !entry.startsWith(`${slug}:`));
  replace("hide", [...others, ...[...names].map((name) => `${slug}:${name}`)]);
}

export function keepTable(slug, open) {
  const now = tables();
  if (open) now.add(slug);
  else now.delete(slug);
  replace("table", [...now]);
}

// Number of zooms in this page's history, that is, how often "back" undoes one.
export const zooms = () => history.state?.zooms ?? 0;

function replace(name, values) {
  const url = new URL(location.href);
  url.searchParams.delete(name);
  for (const value of values) url.searchParams.append(name, value);
  history.replaceState(history.state, "", url);
}

// Plotly's times carry no zone; they are UTC.
export const instant = (text) => Date.parse(/Z$|[+-]\d\d:?\d\d$/.test(text) ? text : `${text.replace(" ", "T")}Z`);
export const stamp = (at) => new Date(at).toISOString().slice(0, 19);

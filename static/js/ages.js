// Shows how long ago each <time data-ago> was, or "For" how long with data-ago="For"; its title has the full time.
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];

export function ago(seconds) {
  if (seconds < -1) return "just now";
  for (const [size, unit] of UNITS) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return seconds < 2 ? "just now" : `${Math.floor(seconds)} s ago`;
}

export function updateAges(root = document) {
  for (const element of root.querySelectorAll("time[data-ago]")) {
    const past = ago((Date.now() - Date.parse(element.dateTime)) / 1000), form = element.dataset.ago;
    const text = form ? `${form} ${past.replace("just now", "a moment").replace(" ago", "")}` : past;
    if (element.textContent !== text) element.textContent = text;
  }
}

export function startAges() {
  updateAges();
  setInterval(() => document.hidden || updateAges(), 1000);
  document.addEventListener("htmx:after:swap", () => updateAges());
}

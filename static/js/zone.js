// Shows times in UTC or in the local time zone, as selected. The server and URLs use UTC. The selection is stored in the
// browser; ?tz=utc or ?tz=local in a link overrides it. Charts listen for "zonechange" on window.
const STORAGE_KEY = "warmpath-zone";
const FORMS = {
  day: { day: "2-digit", month: "short", year: "numeric" },
  minute: { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit" },
  long: { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" },
  second: { hour: "2-digit", minute: "2-digit", second: "2-digit" },
  full: { day: "2-digit", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" },
};

const requested = () => new URL(location.href).searchParams.get("tz");
export const choice = () => ["utc", "local"].find((name) => name === requested()) ?? (localStorage.getItem(STORAGE_KEY) === "local" ? "local" : "utc");
const zone = () => (choice() === "utc" ? "UTC" : undefined); // undefined is the local zone

// Name of the zone at a time: "UTC", "GMT+2".
export function zoneName(at = Date.now()) {
  if (choice() === "utc") return "UTC";
  const parts = new Intl.DateTimeFormat("en-GB", { timeZoneName: "shortOffset" }).formatToParts(at);
  return parts.find((part) => part.type === "timeZoneName").value;
}

// UTC offset at a time, in milliseconds.
export const offset = (at) => (choice() === "utc" ? 0 : -new Date(at).getTimezoneOffset() * 60000);

export function formatTime(at, form) {
  const text = new Intl.DateTimeFormat("en-GB", { ...FORMS[form], hourCycle: "h23", timeZone: zone() }).format(at);
  return `${text.replace(",", "")} ${zoneName(at)}`;
}

export function formatTimes(root = document) {
  for (const element of root.querySelectorAll("time[data-at], time[data-ago]")) {
    const text = formatTime(Date.parse(element.dateTime), element.dataset.at ?? "full");
    if (element.dataset.at && element.textContent !== text) element.textContent = text;
    element.title = text;
  }
}

export function startZone() {
  const groups = document.querySelectorAll("[data-zones]");
  if (!groups.length) return;
  document.querySelector("[data-zone-fixed]").hidden = true;
  for (const group of groups) {
    group.hidden = false;
    group.addEventListener("click", (event) => {
      const selected = event.target.closest("[data-zone]")?.dataset.zone;
      if (selected) choose(selected);
    });
  }
  show();
  formatTimes();
  document.addEventListener("htmx:after:swap", () => formatTimes());
}

function choose(selected) {
  localStorage.setItem(STORAGE_KEY, selected);
  const url = new URL(location.href);
  url.searchParams.delete("tz");
  history.replaceState(history.state, "", url);
  show();
  formatTimes();
  window.dispatchEvent(new Event("zonechange"));
}

function show() {
  for (const button of document.querySelectorAll("[data-zones] [data-zone]")) {
    button.setAttribute("aria-pressed", String(button.dataset.zone === choice()));
  }
}

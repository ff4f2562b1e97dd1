// Shows times in UTC or in the local time zone, as selected. The server and URLs use UTC. The selection is stored in the
// browser; ?tz=utc or ?tz=local in a link overrides it. Charts listen for "zonechange" on window.
const KEPT = "warmpath-zone";
const FORMS = {
  day: { day: "2-digit", month: "short", year: "numeric" },
  minute: { day: "2-digit", month: "short", hour: "2-digit", minute: "2-digit" },
  long: { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" },
  second: { hour: "2-digit", minute: "2-digit", second: "2-digit" },
  full: { day: "2-digit", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" },
};

const asked = () => new URL(location.href).searchParams.get("tz");
export const choice = () => ["utc", "local"].find((one) => one === asked()) ?? (localStorage.getItem(KEPT) === "local" ? "local" : "utc");
const zone = () => (choice() === "utc" ? "UTC" : undefined); // Intl's word for this machine's own is none

// What the zone is called at a time: "UTC", "GMT+2".
export function zoneName(at = Date.now()) {
  if (choice() === "utc") return "UTC";
  const parts = new Intl.DateTimeFormat("en-GB", { timeZoneName: "shortOffset" }).formatToParts(at);
  return parts.find((part) => part.type === "timeZoneName").value;
}

// Milliseconds to add to a time for its wall clock.
export const offset = (at) => (choice() === "utc" ? 0 : -new Date(at).getTimezoneOffset() * 60000);

export function told(at, form) {
  const text = new Intl.DateTimeFormat("en-GB", { ...FORMS[form], hourCycle: "h23", timeZone: zone() }).format(at);
  return `${text.replace(",", "")} ${zoneName(at)}`;
}

export function retell(root = document) {
  for (const element of root.querySelectorAll("time[data-at], time[data-ago]")) {
    const text = told(Date.parse(element.dateTime), element.dataset.at ?? "full");
    if (element.dataset.at && element.textContent !== text) element.textContent = text;
    element.title = text;
  }
}

export function startZone() {
  const group = document.querySelector("[data-zones]");
  if (!group) return;
  group.hidden = false;
  document.querySelector("[data-zone-told]").hidden = true;
  group.addEventListener("click", (event) => {
    const wanted = event.target.closest("[data-zone]")?.dataset.zone;
    if (wanted) choose(wanted, group);
  });
  show(group);
  retell();
  document.addEventListener("htmx:after:swap", () => retell());
}

function choose(wanted, group) {
  localStorage.setItem(KEPT, wanted);
  const url = new URL(location.href);
  url.searchParams.delete("tz");
  history.replaceState(history.state, "", url);
  show(group);
  retell();
  window.dispatchEvent(new Event("zonechange"));
}

function show(group) {
  for (const button of group.querySelectorAll("[data-zone]")) {
    button.setAttribute("aria-pressed", String(button.dataset.zone === choice()));
  }
}

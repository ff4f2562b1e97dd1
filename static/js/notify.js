// Notifications of this browser, where the user asked for them on the alerts page: one for each alert that becomes the
// most urgent in the status strip. Tabs share what was said; a tag lets the browser show it once.
const ON = "warmpath-notify", SAID = "warmpath-notified", MAX_SAID = 50;

export const isNotifying = () => localStorage.getItem(ON) !== null && window.Notification?.permission === "granted";

export function startNotifying() {
  document.addEventListener("htmx:after:swap", () => isNotifying() && notify(true));
  if (isNotifying()) notify(true);
  const button = document.querySelector("[data-notify]");
  if (!button || !window.Notification) return;
  const show = () => (button.textContent = isNotifying() ? "Stop notifying here" : Notification.permission === "denied" ? "Notifications are blocked" : "Notify in this browser");
  button.hidden = document.getElementById("notify-help").hidden = false;
  button.addEventListener("click", async () => {
    if (isNotifying()) localStorage.removeItem(ON);
    else if ((await Notification.requestPermission()) === "granted") localStorage.setItem(ON, "on"), notify(false); // what fires already is on the page
    show();
  });
  show();
}

function notify(aloud) {
  const line = document.querySelector("#worst-alert:not([data-known])"), said = (localStorage.getItem(SAID) ?? "").split(" ");
  if (!line || said.includes(line.dataset.alert)) return;
  localStorage.setItem(SAID, [...said, line.dataset.alert].slice(-MAX_SAID).join(" "));
  if (!aloud) return;
  try {
    const shown = new Notification("Warmpath alert", { body: line.querySelector("strong").textContent, tag: `warmpath-alert-${line.dataset.alert}` });
    shown.onclick = () => (window.focus(), location.assign(`/alerts/${line.dataset.alert}/`));
  } catch {
    localStorage.removeItem(ON); // Chrome on Android has them for service workers alone
  }
}

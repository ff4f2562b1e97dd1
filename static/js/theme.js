// The theme: light, dark or the system's. It is stored in a cookie, so that the server can render <html> with it and the
// page does not flash. Charts listen for "themechange" on window.
const YEAR_S = 31536000;

export function startTheme() {
  const group = document.querySelector("[data-themes]");
  if (!group) return;
  group.hidden = false;
  group.addEventListener("click", (event) => {
    const choice = event.target.closest("[data-theme-choice]")?.dataset.themeChoice;
    if (choice) choose(choice, group);
  });
  show(document.documentElement.dataset.theme ?? "system", group);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
}

function choose(choice, group) {
  const system = choice === "system";
  document.cookie = `theme=${system ? "" : choice};path=/;samesite=lax;max-age=${system ? 0 : YEAR_S}`;
  if (system) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  show(choice, group);
  announce();
}

function show(choice, group) {
  for (const button of group.querySelectorAll("[data-theme-choice]")) {
    button.setAttribute("aria-pressed", String(button.dataset.themeChoice === choice));
  }
}

function announce() {
  window.dispatchEvent(new Event("themechange"));
}

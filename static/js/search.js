// The search dialog, opened by "/": a list of links to select with arrow keys. Without scripts, search is a page.
const WAIT_MS = 120;

export function startSearch() {
  const dialog = document.getElementById("search");
  if (!dialog) return;
  const input = dialog.querySelector("input"), list = dialog.querySelector("ul"), help = dialog.querySelector("[role=status]");
  const form = dialog.querySelector("form");
  let timer = 0, requested = "";

  const open = (event) => {
    event?.preventDefault();
    dialog.showModal();
    input.select();
  };
  document.addEventListener("searchopen", () => open());
  document.querySelector("[data-search]")?.addEventListener("click", open);

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, WAIT_MS);
  });
  form.addEventListener("submit", (event) => {
    const first = list.querySelector("a");
    if (!first || requested !== input.value) return; // submit to the search page
    event.preventDefault();
    location.assign(first.href);
  });
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const stops = [input, ...list.querySelectorAll("a")];
    stops[Math.min(Math.max(stops.indexOf(document.activeElement) + step, 0), stops.length - 1)].focus();
  });

  async function search() {
    const text = input.value;
    try {
      const response = await fetch(`${form.action}?format=json&q=${encodeURIComponent(text)}`);
      if (!response.ok || text !== input.value) return;
      const { found } = await response.json();
      requested = text;
      list.replaceChildren(...found.map(entry));
      help.textContent = found.length ? `${found.length} results. Arrow keys select, Enter opens.` : text ? "No results." : "";
    } catch {
      help.textContent = "Search is unavailable.";
    }
  }
}

function entry({ kind, name, href }) {
  const link = document.createElement("a"), label = document.createElement("span"), word = document.createElement("span");
  link.href = href;
  label.textContent = name;
  word.textContent = kind;
  word.className = "muted small";
  link.append(label, word);
  const item = document.createElement("li");
  item.append(link);
  return item;
}

// The search dialog, opened by "/": links to pages, actions and rows, to select with arrow keys. Without scripts, search
// is a page. Choosing a theme needs no page, so this list alone has it.
const WAIT_MS = 120;
const THEMES = [["light", "Light theme"], ["dark", "Dark theme"], ["system", "Theme of the system"]];

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
    if (!list.children.length || requested !== input.value) search();
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
    first.click();
  });
  list.addEventListener("click", (event) => {
    const theme = event.target.closest("a")?.hash.match(/^#theme-(\w+)$/)?.[1];
    if (!theme) return;
    event.preventDefault();
    document.querySelector(`[data-theme-choice=${theme}]`).click();
    dialog.close();
    input.blur(); // else the closed field has the next key
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
      const carried = document.querySelector(".rail li a")?.search.slice(1) ?? "";
      const response = await fetch(`${form.action}?${carried}&format=json&q=${encodeURIComponent(text)}`);
      if (!response.ok || text !== input.value || list.contains(document.activeElement)) return;
      const { found } = await response.json();
      requested = text;
      const themes = text ? THEMES.filter(([, name]) => `change ${name}`.toLowerCase().includes(text.toLowerCase().trim())) : [];
      found.push(...themes.map(([theme, name]) => ({ kind: "Theme", name, note: "", href: `#theme-${theme}`, key: "" })));
      list.replaceChildren(...found.flatMap((row, at) => (row.kind === found[at - 1]?.kind ? [entry(row)] : [heading(row.kind), entry(row)])));
      help.textContent = found.length
        ? `${found.length} result${found.length === 1 ? "" : "s"}. Arrow keys select, Enter opens, Esc closes.`
        : "No results. Part of a name is enough: gpu finds gpu-1. A kind before it narrows: revision 5, drain gpu-1.";
    } catch {
      help.textContent = "Search is unavailable.";
    }
  }
}

function heading(kind) {
  const item = make("li", kind);
  item.className = "kind";
  return item;
}

function entry({ name, note, href, key }) {
  const link = document.createElement("a"), aside = make("span", key ? "" : note), item = document.createElement("li");
  link.href = href;
  aside.className = "muted small";
  if (key) aside.append(make("kbd", "g"), " ", make("kbd", key));
  link.append(make("span", name), aside);
  item.append(link);
  return item;
}

function make(tag, text) {
  return Object.assign(document.createElement(tag), { textContent: text });
}

// Keys: ? help, g + letter to a page, p pause, t z zoom out. None of them while somebody types.
const TOGETHER_MS = 1500;

export function startKeys() {
  const dialog = document.getElementById("keys");
  let lead = "", at = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || dialog?.open) return;
    const pair = Date.now() - at < TOGETHER_MS ? lead + event.key : "";
    lead = event.key;
    at = Date.now();
    if (event.key === "?") dialog?.showModal();
    else if (pair.length === 2 && pair[0] === "g") go(pair[1]);
    else if (pair === "tz") document.dispatchEvent(new Event("zoomout"));
    else if (event.key === "p") document.dispatchEvent(new Event("pausetoggle"));
  });
}

function go(key) {
  const link = document.querySelector(`[data-go="${CSS.escape(key)}"]`);
  if (link) location.assign(link.href);
}

function typing(element) {
  return element.closest?.("input, textarea, select, [contenteditable]") !== null;
}

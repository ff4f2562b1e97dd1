// Copying: what goes to the clipboard, and buttons that copy the field that they name (data-copy).
export function startCopying() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const field = document.getElementById(button.dataset.copy);
    button.hidden = false;
    button.addEventListener("click", async () => {
      field.select();
      say(button, (await put(field.value)) ? "Copied" : "Press Ctrl+C");
    });
  }
}

// Whether it is there now: without HTTPS, and where the reader forbids it, there is no clipboard.
export async function put(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

export function say(button, text) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = text;
  setTimeout(() => (button.textContent = before), 2000);
}

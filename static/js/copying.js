// Buttons that copy a field to the clipboard (data-copy: its id).
export function startCopying() {
  for (const button of document.querySelectorAll("button[data-copy]")) {
    const field = document.getElementById(button.dataset.copy);
    button.hidden = false;
    button.addEventListener("click", async () => {
      field.select();
      flashLabel(button, (await writeClipboard(field.value)) ? "Copied" : "Press Ctrl+C");
    });
  }
}

// Whether the text was copied. There is no clipboard without HTTPS or permission.
export async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

export function flashLabel(button, text) {
  const before = button.dataset.label ?? button.textContent;
  button.dataset.label = before;
  button.textContent = text;
  setTimeout(() => (button.textContent = before), 2000);
}

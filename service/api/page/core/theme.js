/** Dark and light: what the system prefers, until the reader chooses. */

const THEME = "stackseg-theme";

/** @param {HTMLElement} toggle the button that switches */
export function startTheme(toggle) {
  const chosen = localStorage.getItem(THEME);
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  toggle.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(THEME, next);
    tellCanvases();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tellCanvases);
}

/** Colours on a canvas do not follow the style sheet: each is told to draw again. */
function tellCanvases() {
  for (const canvas of document.querySelectorAll("canvas")) canvas.dispatchEvent(new Event("theme"));
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

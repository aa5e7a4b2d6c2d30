/** The dark and light theme: the system preference, until the user switches. */

const THEME = "stackseg-theme";

/** @param {HTMLElement} toggle the button that switches the theme */
export function startTheme(toggle) {
  const saved = localStorage.getItem(THEME);
  if (saved === "dark" || saved === "light") document.documentElement.dataset.theme = saved;
  toggle.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem(THEME, next);
    redrawCanvases();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCanvases);
}

/** Ask every canvas to redraw, because pixels do not follow the style sheet. */
function redrawCanvases() {
  for (const canvas of document.querySelectorAll("canvas")) canvas.dispatchEvent(new Event("theme"));
}

function isDark() {
  const selected = document.documentElement.dataset.theme;
  return selected ? selected === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

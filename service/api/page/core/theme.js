/** Dark and light theme. The system preference applies until the user switches the theme. */

import { loadValue, saveValue } from "./browser_storage.js";

const THEME_STORAGE_KEY = "stackseg-theme";

/** Apply the saved theme, and connect the button that switches it. @param {HTMLElement} toggle */
export function setUpTheme(toggle) {
  const savedTheme = loadValue("localStorage", THEME_STORAGE_KEY);
  if (savedTheme === "dark" || savedTheme === "light") document.documentElement.dataset.theme = savedTheme;
  toggle.addEventListener("click", () => {
    const nextTheme = isDarkTheme() ? "light" : "dark";
    document.documentElement.dataset.theme = nextTheme;
    saveValue("localStorage", THEME_STORAGE_KEY, nextTheme);
    redrawCanvases();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCanvases);
}

/** Make every canvas redraw itself, because a change of theme does not affect pixels that are already drawn. */
function redrawCanvases() {
  for (const canvas of document.querySelectorAll("canvas")) canvas.dispatchEvent(new Event("theme"));
}

function isDarkTheme() {
  const selectedTheme = document.documentElement.dataset.theme;
  return selectedTheme ? selectedTheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

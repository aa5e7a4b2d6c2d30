/** Dark and light theme. The system preference applies until the user switches the theme. */

const THEME_STORAGE_KEY = "stackseg-theme";

/** Apply the saved theme, and connect the button that switches it. @param {HTMLElement} toggle */
export function setUpTheme(toggle) {
  const savedTheme = loadTheme();
  if (savedTheme === "dark" || savedTheme === "light") document.documentElement.dataset.theme = savedTheme;
  toggle.addEventListener("click", () => {
    const nextTheme = isDarkTheme() ? "light" : "dark";
    document.documentElement.dataset.theme = nextTheme;
    saveTheme(nextTheme);
    redrawCanvases();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCanvases);
}

function loadTheme() {
  try {
    return localStorage.getItem(THEME_STORAGE_KEY);
  } catch {
    // The browser blocks storage.
    return null;
  }
}

/** @param {string} theme */
function saveTheme(theme) {
  try {
    localStorage.setItem(THEME_STORAGE_KEY, theme);
  } catch {
    // If the storage is full or disabled, the theme applies until the page is closed.
  }
}

/** Make every canvas redraw itself, because a change of theme does not affect pixels that are already drawn. */
function redrawCanvases() {
  for (const canvas of document.querySelectorAll("canvas")) canvas.dispatchEvent(new Event("theme"));
}

function isDarkTheme() {
  const selectedTheme = document.documentElement.dataset.theme;
  return selectedTheme ? selectedTheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

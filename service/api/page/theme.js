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
  });
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

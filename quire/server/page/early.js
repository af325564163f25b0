// Sets the chosen theme before the first paint. The only script that is not a module, because
// modules run after the page has been drawn once. See theme.js for the switch.
try {
  const theme = localStorage.getItem("quire.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage in this browser mode: the system's theme it is.
}

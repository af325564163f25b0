// The views as ARIA tabs: arrows move, Home and End jump, the address keeps the choice.

/** Calls `onShow(name)` whenever a view comes to the front, the first one included. */
export function setUpTabs(list, onShow) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];
  const nameOf = (tab) => tab.id.replace("tab-", "");

  const show = (chosen) => {
    for (const tab of tabs) {
      const isChosen = tab === chosen;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
    document.body.dataset.view = nameOf(chosen);
    onShow(nameOf(chosen));
  };
  const choose = (tab) => {
    history.replaceState(null, "", `#${nameOf(tab)}`);
    show(tab);
  };
  const fromAddress = () => tabs.find((tab) => `#${nameOf(tab)}` === location.hash) ?? tabs[0];

  list.addEventListener("click", (event) => {
    const tab = event.target.closest('[role="tab"]');
    if (tab) choose(tab);
  });
  list.addEventListener("keydown", (event) => {
    const here = tabs.indexOf(document.activeElement);
    const steps = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 };
    if (here < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const tab = tabs[(steps[event.key] + tabs.length) % tabs.length];
    tab.focus();
    choose(tab);
  });
  addEventListener("hashchange", () => {
    if (tabs.some((tab) => `#${nameOf(tab)}` === location.hash)) show(fromAddress());
  });
  show(fromAddress());
}

// Keeps the page live: the server renders its content again each second and sends it; nothing is computed here. Only
// sections that changed are replaced, and focus and scrolling stay where they were.
"use strict";
const content = document.getElementById("content");
const live = document.getElementById("live");
const source = new EventSource("events");
source.addEventListener("content", (e) => {
  if (live.textContent !== "live") live.textContent = "live";
  if (document.getSelection().isCollapsed === false) return; // somebody is copying
  const fresh = document.createElement("template");
  fresh.innerHTML = e.data;
  const wanted = [...fresh.content.children];
  for (const old of [...content.children]) if (!wanted.some((n) => n.id === old.id)) old.remove();
  let before = content.firstElementChild;
  for (const next of wanted) {
    const old = document.getElementById(next.id);
    if (!old) { content.insertBefore(next, before); continue; }
    before = old.nextElementSibling;
    if (old.isEqualNode(next)) continue;
    const focus = old.contains(document.activeElement) ? document.activeElement.id : "";
    const places = [...old.querySelectorAll(".scroll")].map((b) => [b.id, b.scrollLeft, b.scrollTop]);
    old.replaceWith(next);
    for (const [id, left, top] of places) { const b = document.getElementById(id); if (b) { b.scrollLeft = left; b.scrollTop = top; } }
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
  }
});
source.onerror = () => { live.textContent = "connection lost; trying again"; };

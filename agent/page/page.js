// Keeps the page live: the server renders its content again each second and sends it; nothing is computed here.
"use strict";
const content = document.getElementById("content");
const live = document.getElementById("live");
let scroll = 0;
const source = new EventSource("events");
source.addEventListener("content", (e) => {
  const box = content.querySelector(".scroll");
  const focused = box && document.activeElement === box;
  scroll = box ? box.scrollLeft : scroll;
  if (document.getSelection().isCollapsed === false) return; // somebody is copying
  content.innerHTML = e.data;
  const now = content.querySelector(".scroll");
  if (now) { now.scrollLeft = scroll; if (focused) now.focus({ preventScroll: true }); }
  if (live.textContent !== "live") live.textContent = "live";
});
source.onerror = () => { live.textContent = "connection lost; trying again"; };

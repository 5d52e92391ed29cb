// Keeps the sections of the page equal to the frames that /v1/live streams. All HTML in them was escaped by the server.
"use strict";

const byId = (id) => document.getElementById(id);
const SECTIONS = ["state", "figures", "topology", "ttft", "tiers", "fallbacks", "events"];
const key = "pdxfer-token";
let isPaused = false;
let waiting = {}; // fragments that came while paused, or while the reader was inside the section

const headers = () => {
  const token = sessionStorage.getItem(key);
  return token ? { Authorization: `Bearer ${token}` } : {};
};

function say(text) {
  if (byId("link").textContent !== text) byId("link").textContent = text;
}

function show(id, html) {
  const section = byId(id);
  const open = [...section.querySelectorAll("details[open]")].map((d) => d.id);
  const scroll = [...section.querySelectorAll(".scroll")].map((s) => s.scrollLeft);
  const focused = section.contains(document.activeElement) ? document.activeElement.closest("details, .scroll") : null;
  const at = focused ? [...section.querySelectorAll("details > summary, .scroll")].indexOf(document.activeElement) : -1;
  section.innerHTML = html;
  for (const detail of open) if (byId(detail)) byId(detail).open = true;
  section.querySelectorAll(".scroll").forEach((s, i) => { s.scrollLeft = scroll[i] || 0; });
  if (at >= 0) section.querySelectorAll("details > summary, .scroll")[at]?.focus({ preventScroll: true });
}

function apply(frame) {
  Object.assign(waiting, frame);
  if (isPaused) return;
  for (const id of SECTIONS) if (id in waiting) show(id, waiting[id]);
  if (waiting.latest) {
    byId("latest").replaceChildren(...waiting.latest.map((id) => Object.assign(document.createElement("option"), { value: id })));
  }
  waiting = {};
}

async function follow() {
  const answer = await fetch("v1/live", { headers: headers(), cache: "no-store" });
  if (answer.status === 401) {
    const hadToken = sessionStorage.getItem(key) !== null;
    sessionStorage.removeItem(key);
    askForToken(hadToken ? "That was not the token." : "");
    return false;
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    say(isPaused ? "paused" : "live");
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).split("\n").filter((l) => l.startsWith("data: ")).map((l) => l.slice(6)).join("\n");
      text = text.slice(end + 2);
      if (data) apply(JSON.parse(data));
    }
  }
}

async function run() {
  for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
    try {
      if (!(await follow())) return;
      pause = 500;
    } catch (error) {
      console.debug(error);
    }
    say("disconnected, trying again");
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
  }
}

function askForToken(problem) {
  say("locked");
  byId("login").hidden = false;
  byId("login-error").textContent = problem;
  byId("token").focus();
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(key, byId("token").value.trim());
  byId("token").value = "";
  byId("login").hidden = true;
  run();
});

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", String(isPaused));
  byId("pause").textContent = isPaused ? "Go on" : "Pause";
  say(isPaused ? "paused" : "live");
  apply({});
});

async function showRequest(id) {
  const answer = await fetch(`ui/requests/${encodeURIComponent(id)}`, { headers: headers(), cache: "no-store" });
  byId("timeline").innerHTML = await answer.text();
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("request").value.trim();
  history.replaceState(null, "", `?request=${encodeURIComponent(id)}`);
  showRequest(id);
});

const asked = new URLSearchParams(location.search).get("request");
if (asked) {
  byId("request").value = asked;
  showRequest(asked);
}
run();

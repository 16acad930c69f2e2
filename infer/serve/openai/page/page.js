// The page: the model and its load at the top, a conversation below. Texts of a model are set as text, never as markup.

import { Server } from "./server.js";

const REFRESH_MS = 2000;
const server = new Server();
const at = (id) => document.getElementById(id);
let hasChat = false;
let mayLoad = true; // until the server says that our token does not show the load
let messages = []; // the conversation so far, as the server takes it
let answering = null; // the AbortController of the answer that comes now

// ---- the model and its load ----

async function refresh() {
  try {
    const [model] = (await server.get("v1/models")).data;
    showModel(model);
    at("access").hidden = true;
    await refreshLoad();
  } catch (error) {
    if (error.status === 401 || error.status === 403) askForToken(error);
    else showState(error.message, "bad");
    at("load").hidden = true;
  }
}

async function refreshLoad() {
  if (!mayLoad) return showState("serving", "good");
  try {
    showLoad(await server.get("load"));
  } catch (error) {
    if (error.status !== 403) throw error;
    mayLoad = false;
    at("no-load").textContent = "The load is shown with a token of the role admin.";
    at("no-load").hidden = false;
    showState("serving", "good");
  }
}

function showModel(model) {
  hasChat = model.has_chat_template;
  document.title = at("name").textContent = model.id;
  const step = model.step ? `step ${model.step}, ` : "";
  at("about").textContent = `${step}${model.max_model_len} tokens per request`;
  at("prompt-label").textContent = hasChat ? "Message" : "Text to continue";
  at("clear").textContent = hasChat ? "New conversation" : "Clear";
  at("empty").textContent = hasChat
    ? "Say something to the model."
    : "This model has no chat template: it continues the text that it gets.";
}

function showLoad(load) {
  const used = load.blocks_used / Math.max(load.blocks_total, 1);
  at("running").textContent = load.running;
  at("waiting").textContent = load.waiting;
  at("speed").textContent = (load.prefill_tokens_per_second + load.decode_tokens_per_second).toFixed(0);
  at("used").textContent = `${(100 * used).toFixed(0)} %`;
  at("meter").value = used;
  at("load").hidden = false;
  at("no-load").hidden = true;
  showState(load.state, load.state === "serving" ? "good" : "bad");
}

function showState(text, kind) {
  const state = at("state");
  if (state.textContent !== text) state.textContent = text; // a screen reader reads changes only
  state.dataset.kind = kind;
}

function askForToken(error) {
  const first = at("access").hidden && !server.token;
  showState("needs a token", "bad");
  at("access-error").textContent = first ? "" : error.message;
  at("access").hidden = false;
}

async function keepRefreshing() {
  const waitsForToken = !at("access").hidden;
  if (!document.hidden && !waitsForToken) await refresh();
  setTimeout(keepRefreshing, REFRESH_MS);
}

at("access").addEventListener("submit", async (event) => {
  event.preventDefault();
  server.token = at("token").value.trim();
  mayLoad = true;
  await refresh();
  if (at("access").hidden) {
    at("token").value = "";
    at("prompt").focus();
  }
});

// ---- the conversation ----

async function ask(text) {
  // An empty field is NaN, which becomes null in JSON: unset.
  const options = { max_tokens: at("most").valueAsNumber, temperature: at("temperature").valueAsNumber };
  const question = { role: "user", content: text };
  const conversation = messages; // "New conversation" replaces it
  const path = hasChat ? "v1/chat/completions" : "v1/completions";
  const body = hasChat ? { ...options, messages: [...conversation, question] } : { ...options, prompt: text };
  addTurn(hasChat ? "You" : "Text").text.append(text);
  const turn = addTurn(hasChat ? "Model" : "Continuation");
  setAnswering(new AbortController());
  turn.article.setAttribute("aria-busy", "true");
  const began = performance.now();
  let answer = "";
  let usage = null;
  let note = "";
  try {
    for await (const event of server.stream(path, body, answering.signal)) {
      usage = event.usage ?? usage;
      for (const choice of event.choices) {
        const piece = (hasChat ? choice.delta.content : choice.text) ?? "";
        answer += piece;
        append(turn.text, piece);
        if (choice.finish_reason === "length") note = "cut at the most tokens";
      }
    }
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else addError(turn, error, text, answer);
  } finally {
    turn.article.removeAttribute("aria-busy");
    setAnswering(null);
  }
  if (answer) conversation.push(question, { role: "assistant", content: answer });
  addNote(turn, [usage && numbersOf(usage, performance.now() - began), note].filter(Boolean).join(", "));
}

function numbersOf(usage, milliseconds) {
  const seconds = milliseconds / 1000;
  return `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s`;
}

function addTurn(who) {
  const article = document.createElement("article");
  const heading = document.createElement("h2");
  const text = document.createElement("p");
  heading.textContent = who;
  text.className = "text";
  article.className = who === "You" || who === "Text" ? "mine" : "models";
  article.append(heading, text);
  at("log").append(article);
  at("empty").hidden = true;
  article.scrollIntoView({ block: "end" });
  return { article, text };
}

function append(element, text) {
  const log = at("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40; // else the reader looks at something else
  element.append(text); // as a text node
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function addError(turn, error, question, answer) {
  if (error.status === 401 || error.status === 403) askForToken(error);
  const shown = document.createElement("p");
  shown.className = "error";
  shown.setAttribute("role", "alert");
  shown.textContent = error.message;
  turn.article.append(shown);
  if (!answer && !at("prompt").value) at("prompt").value = question; // to send it again
  shown.scrollIntoView({ block: "nearest" }); // last: the box has grown
}

function addNote(turn, text) {
  if (!text) return;
  const note = document.createElement("p");
  note.className = "quiet";
  note.textContent = text;
  turn.article.append(note);
  turn.article.scrollIntoView({ block: "end" });
}

function setAnswering(controller) {
  answering = controller;
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (!text.trim() || answering) return;
  at("prompt").value = "";
  ask(text);
});

at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") answering?.abort();
});

at("stop").addEventListener("click", () => {
  answering?.abort();
  at("prompt").focus();
});

at("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  at("log").replaceChildren();
  at("empty").hidden = false;
  at("prompt").focus();
});

keepRefreshing();

// Server-sent events from bytes. A chunk may end anywhere: within a character, a line end or an event.
// Follows the HTML standard, section "Parsing an event stream": lines end in LF, CR or CRLF, an empty one ends an
// event, lines of `data` are joined, comments and other fields are skipped, an unfinished last event is dropped.

// A CR at the very end may be half of a CRLF, so it waits for the next chunk.
const LINE_END = /\r\n|\n|\r(?!$)/g;

/** The data of each event in a ReadableStream of bytes. Leaving the loop early cancels the stream. */
export async function* events(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      let start = 0;
      for (const end of rest.matchAll(LINE_END)) {
        const line = rest.slice(start, end.index);
        start = end.index + end[0].length;
        if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        } else if (line === "data" || line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        }
      }
      if (done) return;
      rest = rest.slice(start);
    }
  } finally {
    // Rejects when the stream has failed, which the reader was told by `read` already.
    reader.cancel().catch(() => {});
  }
}

// Browsers start no worker for a page that was opened as a file, and the theme's search is one. On such pages its script runs in a
// hidden frame, and messages pass as events. The theme's offline plugin would fetch a script for that from another host.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow;
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(inside);
        };
      });
      frame.srcdoc = `<script src="${new URL(url, location.href)}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  }
  // the search's script asks its parent for this name
  window.IFrameWorker = window.Worker = IFrameWorker;
}

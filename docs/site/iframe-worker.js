// Pages opened as files may not start workers, so there the worker of the search runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = src => new Promise((done, failed) => {
        const script = Object.assign(inside.document.createElement("script"), { src, onload: done, onerror: failed });
        inside.document.body.append(script);
      });
      inside.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      inside.postMessage = data => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.loaded = load(new URL(url, location.href).href);
      this.inside = inside;
      this.frame = frame;
    }
    postMessage(data) {
      this.loaded.then(() => {
        const message = new this.inside.MessageEvent("message", { data });
        this.inside.dispatchEvent(message);
        if (this.inside.onmessage) this.inside.onmessage(message);
      });
    }
    terminate() { this.frame.remove(); }
  };

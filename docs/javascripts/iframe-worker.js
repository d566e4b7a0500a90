// Browsers start no worker from a file, so search would not work in a folder. There the worker's script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      const script = this.scope.document.createElement("script");
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.src = url;
      this.scope.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

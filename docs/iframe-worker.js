// A page that was opened from a file may start no worker, and the search of the
// site is one. Here its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = `<script src="${url}"></script>`
      this.loaded = new Promise(resolve => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const deliver = inside.postMessage.bind(inside)
          inside.postMessage = data =>
            this.dispatchEvent(new MessageEvent("message", { data }))
          resolve(deliver)
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.loaded.then(deliver => deliver(data, "*"))
    }
  }
  window.Worker = window.IFrameWorker
}

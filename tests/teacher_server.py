"""A small HTTP server on the loopback address that speaks the part of vLLM's completions API that teachers need."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch


class TeacherServer:
    """Serves the prompt log-probs of a causal language model of transformers.

    Attributes:
        url: address of the server, in the form that `algorithm.distillation.teachers` expects.
        requests: bodies of the completion requests so far.
        fails: function from the number of a completion request to an HTTP status for a failure, or None.
        answer: function that changes the JSON answer to a completion request.
        max_model_len: maximum number of tokens that the server reports; None if the server reports no maximum.
    """

    def __init__(self, model, decode=lambda token: chr(token)):
        self.model, self.decode = model, decode
        self.requests, self.paths, self.keys = [], [], []
        self.fails, self.answer, self.max_model_len = lambda number: None, lambda answer: answer, 4096
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def log_probs(self, ids):
        """Return the log-prob of each token after the first, computed for this row alone."""
        with self._lock, torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def complete(self, body):
        ids = body["prompt"]
        entries = [
            {str(token): {"logprob": value, "rank": 1, "decoded_token": self.decode(token)}}
            for token, value in zip(ids[1:], self.log_probs(ids), strict=True)
        ]
        return self.answer(
            {"object": "text_completion", "choices": [{"text": "", "prompt_logprobs": [None, *entries]}]}
        )

    def models(self):
        return {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": self.max_model_len}]}

    def _handler(server):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def send(self, status, content):
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                server.keys.append(self.headers.get("Authorization"))
                self.send(200, server.models())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append(body)
                    server.paths.append(self.path)
                    number = len(server.requests) - 1
                status = server.fails(number)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    if status is None:
                        self.send(200, server.complete(body))
                    else:
                        self.send(status, {"error": {"message": f"failure {status}"}})

        return Handler

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

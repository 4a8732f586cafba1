"""A stand-in for the library SGLang, with the methods of `sglang.Engine` that rltrain calls, and their arguments.

Names, arguments, refusals and the form of the outputs were read in the source of SGLang 0.5.23. Whether SGLang behaves
like this was not tested. The stand-in computes with a transformers model, so a run with it shows that rltrain's part of
the engine is right.
"""

import asyncio
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

__version__ = "0.5.23"
ARGUMENTS = {
    "model_path", "trust_remote_code", "dtype", "skip_tokenizer_init", "context_length",
    "max_running_requests", "tp_size", "mem_fraction_static", "enable_memory_saver", "stream_interval", "log_level",
    "disable_cuda_graph",
}  # fmt: skip
SAMPLING = {"temperature", "max_new_tokens", "stop_token_ids", "skip_special_tokens"}


class Engine:
    """Records its calls in `log`."""

    def __init__(self, **arguments):
        if unknown := arguments.keys() - ARGUMENTS:
            raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
        self.arguments, self.log, self.released = arguments, [], set()
        self.loop = asyncio.new_event_loop()
        self.model = AutoModelForCausalLM.from_pretrained(arguments["model_path"], dtype=torch.float32).eval()
        self.tokenizer_manager = SimpleNamespace(abort_request=self._abort, flush_cache=self._flush_cache)
        self.generator = torch.Generator().manual_seed(0)
        self.aborted, self.running, self.broken, self.session = 0, 0, "", False

    def _abort(self, rid="", abort_all=False):
        assert abort_all
        self.aborted += 1

    async def async_generate(
        self, prompt=None, sampling_params=None, input_ids=None, *, return_logprob=False, stream=False
    ):
        assert prompt is None
        assert return_logprob
        assert stream
        assert not self.released, "a sleeping engine cannot generate"
        assert sampling_params.keys() <= SAMPLING
        return self._outputs(input_ids, sampling_params, self.aborted)

    async def _outputs(self, prompt, params, aborted):
        # The longest request of SGLang's scheduler is one token shorter than the context.
        longest = self.arguments["context_length"] - 1
        if len(prompt) >= longest - 5:
            reason = {"type": "abort", "message": "Input is too long", "status_code": 400}
            yield {"output_ids": [], "meta_info": {"finish_reason": reason, "output_token_logprobs": []}}
            return
        self.running += 1
        try:
            most = min(params["max_new_tokens"], longest - len(prompt) - 1)
            async for output in self._sampled(prompt, params, most, aborted):
                yield output
        finally:
            self.running -= 1

    async def _sampled(self, prompt, params, most, aborted):
        sampled, temperature = [], params["temperature"]
        while True:
            await asyncio.sleep(0)
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *(token for _, token, _ in sampled)]])
                logits = self.model(ids).logits[0, -1].float()
            log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(
                logits.argmax() if temperature == 0 else log_probs.exp().multinomial(1, generator=self.generator)
            )
            sampled.append((float(log_probs[token]), token, None))
            reason = None
            if token in params["stop_token_ids"]:
                reason = {"type": "stop", "matched": token}
            elif len(sampled) == most:
                reason = {"type": "length", "length": len(sampled)}
            elif self.aborted > aborted:
                reason = {"type": "abort", "message": "Abort in waiting queue"}
            if reason or len(sampled) % self.arguments["stream_interval"] == 0:
                facts = {"finish_reason": reason, "output_token_logprobs": list(sampled), "weight_version": "default"}
                yield {"output_ids": [token for _, token, _ in sampled], "meta_info": facts}
            if reason:
                return

    def begin_weight_update(self, selector="all"):
        if self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return True, "Success"

    def end_weight_update(self):
        if not self.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return True, "Success"

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        if not self.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert "weights" not in self.released, "weights are loaded while their memory is released"
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in named_tensors:
            if self.broken == name:
                return False, f"unknown parameter {name}"
            with torch.no_grad():
                parameters[name].copy_(tensor)
            self.log.append(name)
        return True, "Success"

    async def _flush_cache(self, timeout_s=None):
        self.log.append("flush_cache")
        return SimpleNamespace(success=self.running == 0)

    def release_memory_occupation(self, tags=None):
        assert not self.running, "release_memory_occupation should be called only when server is idle."
        self.released |= set(tags)
        self.log.append(f"release {' '.join(tags)}")

    def resume_memory_occupation(self, tags=None):
        self.released -= set(tags)
        self.log.append(f"resume {' '.join(tags)}")

    def shutdown(self):
        self.log.append("shutdown")

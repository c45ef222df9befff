"""The whole vLLM engine on a CPU as a process that is told what to do, line by line, and the other end of that.

``python wholeengine.py MODEL TRANSFER HASHES`` reads commands as JSON from its standard input and answers on its
standard output: ``{"generate": [prompt, ...]}`` with tokens and cached tokens of each; ``{"stream": [prompt, ...],
"pause": N}`` stops after N steps until a line comes, and tells first how many steps there were and how long the longest
took.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODEL_TOKENS = 512
NEW_TOKENS = 8


class Engine:
    """The other end: one engine process."""

    def __init__(self, model: Path, transfer: dict[str, Any], *, log: Path, hashes: str = "sha256_cbor") -> None:
        folder = Path(__file__).parent
        quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
        environment = {**os.environ, **quiet, "PYTHONPATH": str(folder), "LMCACHE_TRACK_USAGE": "false"}
        self._log = log.open("w", buffering=1)
        self._process = subprocess.Popen(
            [sys.executable, folder / "wholeengine.py", model, json.dumps(transfer), hashes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        #: vLLM leaves it behind unless it is shut down in order.
        self._left = Path(f"/dev/shm/vllm_offload_{self.receive('ready')}.mmap")

    def send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def receive(self, word: str) -> Any:
        """What is answered under ``word``; the engine's own output goes to the log."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{") and word in (answer := json.loads(line)):
                return answer[word]
            self._log.write(line)
        self._log.flush()
        raise AssertionError(f"the engine ended: {Path(self._log.name).read_text()[-3000:]}")

    def generate(self, *prompts: list[int]) -> list[dict[str, Any]]:
        self.send(generate=prompts)
        outputs: list[dict[str, Any]] = self.receive("outputs")
        return outputs

    def close(self) -> None:
        self.send(end=True)
        self._process.wait(60)
        for end in (self._process.stdin, self._process.stdout, self._log):
            if end is not None:
                end.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None and not any(exc):
            self.close()
        else:
            self._process.kill()
            self._process.wait(20)
        self._left.unlink(missing_ok=True)


def make_model(path: Path) -> Path:
    """A Llama of two layers whose random weights are large enough that other prompts give other tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        vocab_size=MODEL_TOKENS,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **heads,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    return path


def main(model: str, transfer: dict[str, Any], hashes: str) -> None:
    import builtins

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.triton_utils import dispatcher

    # With LMCache in the environment vLLM asks for the variables of an object that has none.
    dispatcher.vars = lambda thing: found if isinstance(found := builtins.vars(thing), dict) else {}
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        max_num_seqs=4,
        seed=0,
        prefix_caching_hash_algo=hashes,
        kv_transfer_config=KVTransferConfig(**transfer),
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False)

    def outputs(done: list[Any]) -> list[dict[str, Any]]:
        return [{"tokens": list(one.outputs[0].token_ids), "cached": one.num_cached_tokens} for one in done]

    print(json.dumps({"ready": llm.llm_engine.vllm_config.kv_transfer_config.engine_id}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "end" in command:
            break
        if "generate" in command:
            prompts = [{"prompt_token_ids": ids} for ids in command["generate"]]
            done = outputs(llm.generate(prompts, params, use_tqdm=False))
            llm.reset_prefix_cache()
            for _ in range(100):  # what was computed last is stored in steps to come
                llm.llm_engine.step()
                time.sleep(0.01)
        else:
            for number, ids in enumerate(command["stream"]):
                llm.llm_engine.add_request(f"stream-{number}", {"prompt_token_ids": ids}, params)
            finished, step, longest_s = [], 0, 0.0
            while llm.llm_engine.has_unfinished_requests():
                begin_s = time.monotonic()
                finished += [one for one in llm.llm_engine.step() if one.finished]
                longest_s = max(longest_s, time.monotonic() - begin_s)
                step += 1
                if step == command["pause"]:
                    print(json.dumps({"paused": step}), flush=True)
                    sys.stdin.readline()
            done = outputs(sorted(finished, key=lambda one: one.request_id))
            print(json.dumps({"steps": [step, longest_s]}), flush=True)
        print(json.dumps({"outputs": done}), flush=True)
    os._exit(0)  # threads of the engine may be waiting for a pool that is no more


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])

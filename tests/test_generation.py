import os
import pickle
from dataclasses import asdict

import pytest
import torch

from logitless.generation import complete, generate, load_checkpoint
from logitless.model import GPT, GPTConfig, KeyValueCache
from logitless.tokenizer import END_OF_TEXT, train_bpe

V, VOCAB = 320, 290  # ids from VOCAB on are padding
PROMPTS = [[5, 9, 200], [1], [7, 7, 3, 100, 42, 11, 8]]


def make_gpt(seed: int = 0, **options) -> GPT:
    """A small random GPT whose likeliest tokens change from step to step."""
    config = {"n_layers": 2, "n_heads": 2, "width": 32, "padded_vocab_size": V, "mlp": "swiglu"}
    gpt = GPT(GPTConfig(**config | {"tied": False, "head_bias": True, "dropout": 0.0} | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3, generator=generator)
    return gpt.eval()


def sample(gpt, prompts=PROMPTS, **options):
    defaults = {"max_new_tokens": 16, "temperature": 0.0, "top_k": None, "tokenizer_size": VOCAB, "seed": 0}
    return generate(gpt, prompts, **defaults | options)


@torch.no_grad()
def greedy_without_cache(gpt, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        logits = gpt.head.logits(gpt(torch.tensor([ids])))[0, -1, :VOCAB]
        ids.append(int(logits.argmax()))
    return ids


@pytest.fixture(scope="module")
def gpt():
    return make_gpt()


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["It was a truth universally acknowledged, that it was a truth.\n"] * 3, VOCAB)


# Sampling


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_with_the_cache_equals_full_passes_without(gpt, prompt):
    right = greedy_without_cache(gpt, prompt, 16)
    assert sample(gpt, [prompt]) == [right]
    assert len(set(right[len(prompt) :])) > 2  # a loop of one token would show nothing


@torch.no_grad()
def test_logits_with_the_cache_equal_those_without(gpt):
    tokens = torch.tensor([PROMPTS[2]])
    cache = KeyValueCache(gpt.config, 1, tokens.shape[1], tokens.device, torch.float32)
    hidden = torch.cat([gpt(tokens[:, t : t + 1], cache) for t in range(tokens.shape[1])], dim=1)
    torch.testing.assert_close(gpt.head.logits(hidden), gpt.head.logits(gpt(tokens)), atol=1e-4, rtol=1e-4)


def test_prompts_of_different_lengths_in_a_batch_give_what_each_gives_alone(gpt):
    together = sample(gpt)
    assert together == [sample(gpt, [prompt])[0] for prompt in PROMPTS]
    assert [row[: len(prompt)] for row, prompt in zip(together, PROMPTS, strict=True)] == PROMPTS
    assert [len(row) for row in together] == [len(prompt) + 16 for prompt in PROMPTS]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(gpt):
    texts = [sample(gpt, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_sampling_leaves_the_global_generator_alone(gpt):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    sample(gpt, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_of_1_is_greedy(gpt):
    assert sample(gpt, temperature=1.0, top_k=1) == sample(gpt)


def test_top_k_samples_among_the_k_likeliest_and_reaches_them_all(gpt):
    with torch.no_grad():
        likeliest = gpt.head.logits(gpt(torch.tensor([PROMPTS[0]])))[0, -1, :VOCAB].topk(3).indices.tolist()
    options = {"max_new_tokens": 1, "temperature": 5.0, "top_k": 3}
    sampled = [row[-1] for row in sample(gpt, [PROMPTS[0]] * 200, **options)]
    assert set(sampled) == set(likeliest)


def test_a_top_k_beyond_the_vocabulary_is_no_limit(gpt):
    assert sample(gpt, temperature=1.0, top_k=10**6) == sample(gpt, temperature=1.0)


def test_temperature_follows_the_softmax():
    gpt = make_gpt()
    with torch.no_grad():
        gpt.head.weight.zero_()
        gpt.head.bias.fill_(-1e4)
        gpt.head.bias[[10, 20]] = torch.tensor([0.0, 2.0])
    options = {"max_new_tokens": 1, "temperature": 2.0}
    sampled = torch.tensor([row[-1] for row in sample(gpt, [[1]] * 4000, **options)])
    assert set(sampled.tolist()) == {10, 20}
    assert float((sampled == 20).float().mean()) == pytest.approx(torch.sigmoid(torch.tensor(1.0)).item(), abs=0.03)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 5.0, "top_k": 300}])
def test_padding_of_the_vocabulary_is_never_sampled(options):
    gpt = make_gpt()
    with torch.no_grad():
        gpt.head.bias[VOCAB:] = 100.0
    assert max(max(row) for row in sample(gpt, **options)) < VOCAB
    assert max(max(row) for row in sample(gpt, **options, tokenizer_size=V)) >= VOCAB  # they would be, if they counted


# Text


def test_completions_begin_with_their_prompts(gpt, tokenizer):
    prompts = ["It was", "a truth universally", ""]
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_k": 50, "seed": 1}
    texts = complete(gpt, tokenizer, prompts, **options)
    assert all(text.startswith(prompt) for text, prompt in zip(texts, prompts, strict=True))
    assert texts != prompts


def test_a_completion_stops_at_end_of_text(tokenizer):
    gpt, letter = make_gpt(), tokenizer.token_to_id("x")
    with torch.no_grad():  # a coin decides between the letter and the end
        gpt.head.weight.zero_()
        gpt.head.bias.fill_(-1e4)
        gpt.head.bias[[letter, tokenizer.token_to_id(END_OF_TEXT)]] = 0.0
    options = {"max_new_tokens": 30, "temperature": 1.0, "top_k": None, "seed": 1}
    lengths = [len(text) for text in complete(gpt, tokenizer, [""] * 100, **options)]
    assert min(lengths) == 0
    assert sum(lengths) / 100 == pytest.approx(1, abs=0.5)  # 15 if the text went on behind the end


# Checkpoints


def checkpoint_of(gpt, tokenizer) -> dict:
    """What a training run saves, as far as generation reads it."""
    return {
        "hyper_parameters": {"model": asdict(gpt.config)},
        "state_dict": {f"gpt.{name}": tensor for name, tensor in gpt.state_dict().items()},
        "tokenizer": tokenizer.to_str(),
        "epoch": 0,
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_gives_back_model_and_tokenizer(tmp_path, tokenizer, tied):
    gpt = make_gpt(tied=tied)
    torch.save(checkpoint_of(gpt, tokenizer), tmp_path / "last.ckpt")
    loaded, loaded_tokenizer = load_checkpoint(tmp_path / "last.ckpt", torch.device("cpu"))
    assert loaded.config == gpt.config
    assert not loaded.training
    assert (loaded.head.weight is loaded.embedding.weight) == tied
    assert loaded_tokenizer.to_str() == tokenizer.to_str()
    assert sample(loaded) == sample(gpt)


def without_a_field(parameters: dict) -> None:
    del parameters["model"]["dropout"]


FOREIGN = {
    "instantiator": lambda parameters: parameters.update(_instantiator="os.getcwd"),
    "instantiator in the model": lambda parameters: parameters["model"].update(_instantiator="os.getcwd"),
    "target": lambda parameters: parameters["model"].update(_target_="os.getcwd"),
    "other hyper-parameters": lambda parameters: parameters.update(lr=1.0),
    "a field missing": without_a_field,
    "no model": lambda parameters: parameters.clear(),
    "a wrong shape": lambda parameters: parameters["model"].update(n_heads=3),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_hyper_parameters_are_refused(tmp_path, gpt, tokenizer, case):
    checkpoint = checkpoint_of(gpt, tokenizer)
    FOREIGN[case](checkpoint["hyper_parameters"])
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=r"does not hold the hyper-parameters of a GPT|must be an even multiple"):
        load_checkpoint(tmp_path / "last.ckpt", torch.device("cpu"))


def test_a_checkpoint_from_before_activation_checkpointing_loads(tmp_path, gpt, tokenizer):
    checkpoint = checkpoint_of(gpt, tokenizer)
    del checkpoint["hyper_parameters"]["model"]["checkpoint"]
    torch.save(checkpoint, tmp_path / "last.ckpt")
    loaded, _ = load_checkpoint(tmp_path / "last.ckpt", torch.device("cpu"))
    assert loaded.config == gpt.config


def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path, gpt):
    torch.save(gpt.state_dict(), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(tmp_path / "weights.pt", torch.device("cpu"))


def test_a_checkpoint_with_other_weights_is_refused(tmp_path, gpt, tokenizer):
    """As one from before a change of the model."""
    checkpoint = checkpoint_of(gpt, tokenizer)
    checkpoint["state_dict"]["gpt.of_old"] = checkpoint["state_dict"].pop("gpt.norm.weight")
    torch.save(checkpoint, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="of another model or an older version"):
        load_checkpoint(tmp_path / "last.ckpt", torch.device("cpu"))


class Trap:
    """Pickled, it is a call of os.mkdir: whoever unpickles it trustingly makes the folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["hyper_parameters", "tokenizer", "callbacks"])
def test_a_callable_in_the_pickle_is_refused_and_not_called(tmp_path, gpt, tokenizer, place):
    made = tmp_path / "made"
    torch.save(checkpoint_of(gpt, tokenizer) | {place: Trap(made)}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(tmp_path / "last.ckpt", torch.device("cpu"))
    assert not made.exists()
    pickle.loads(pickle.dumps(Trap(made)))
    assert made.exists()  # the trap works

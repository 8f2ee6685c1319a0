"""The commands, in groups: functions that need nothing of each other. Each keeps entries under names of its own."""

from __future__ import annotations

import json

from tests.guard.lab import Lab


def steps(count: int, evaluations: int = 1) -> str:
    """A run that is usually judged once, at its end: which weights are the best is then no question."""
    every = count // evaluations
    return f"--precision fp32 --steps {count} --eval-every {every} --save-every {min(every, count // 2)} --lr 0.02"


STEPS = steps(16)
FINETUNE = f"finetune bert {STEPS} --batch-tokens 96"
# titles without what is chosen for them
PLAIN = "--layer-decay 1 --label-smoothing 0 --end-bias 0 --length-penalty 1 --no-repeat-ngram 3"
LABELS = "--task classify --data single.jsonl --eval single-dev.jsonl"
SHAPE = "--layers 1 --width 16 --heads 2 --inner 32"
PRETRAIN = f"pretrain {STEPS} {SHAPE} --batch-tokens 160 --data corpus.txt --eval corpus-dev.txt --tokenizer tok"
PRETRAIN += " --max-positions 64 --length 24 --objective"


def titles(lab: Lab) -> None:
    line = f"{FINETUNE} --max-target 6 --label-smoothing 0 --task"
    lab.train("title", f"{line} title --data write.jsonl --eval write-dev.jsonl {PLAIN} {steps(48)}")
    lab.train("naive", f"{line} title --data zh.jsonl --mask naive --layer-decay 0.8 --lm-weight 0.5")
    lab.train("translate", f"{line} translate --data write.jsonl --eval zh-dev.jsonl --label-smoothing 0.1")
    lab.ask("evaluate en", "evaluate title en-dev.jsonl --precision fp32 --min-new 2 --json")
    lab.ask("evaluate zh", "evaluate title zh-dev.jsonl --precision fp32 --min-new 2 --json")
    lab.ask("evaluate translate", "evaluate translate zh-dev.jsonl --beams 2 --min-new 2 --precision fp32 --json")
    lab.ask("predict greedy", "predict title write-dev.jsonl -o - --precision fp32 --quiet --min-new 2")
    line = "predict title write-dev.jsonl -o - --precision fp32 --quiet --beams 3 --n-best 2"
    lab.ask("predict beams", f"{line} --length-penalty 0.6")


def labels(lab: Lab) -> None:
    line = f"{FINETUNE} --task classify --data {{0}}.jsonl --eval {{0}}-dev.jsonl"
    more = {"single": "--class-weights balanced", "multi": f"{steps(48)} --lr 0.01", "number": "", "pairs": ""}
    for name, options in more.items():
        lab.train(name, f"{line.format(name)} {options}")
        lab.ask(f"predict {name}", f"predict {name} {name}-dev.jsonl -o - --precision fp32 --quiet")
        lab.ask(f"evaluate {name}", f"evaluate {name} {name}-dev.jsonl --precision fp32 --json --show 1")
    lab.train("lm", f"{line.format('single')} --lm-weight 0.5")
    lab.train("freeze", f"{line.format('single')} --freeze")
    lab.train("windows", f"{line.format('pairs')} --max-length 12 --truncate windows --pool-windows max --ema 0.5")


def several(lab: Lab) -> None:
    """A run that was cut off, one that is judged often, one that is repeated."""
    lab.train("whole", f"{FINETUNE} {LABELS}")
    lab.train_cut("cut", f"{FINETUNE} {LABELS}", 16)
    lab.keep_run("cut", "whole resumed")
    lab.train("best", f"finetune bert {steps(16, 4)} --batch-tokens 96 {LABELS} --patience 3")
    lab.ask("seeds", f"{FINETUNE} {LABELS} --seeds 2 --out seeds --quiet --json")
    lab.keep_weights("seeds/final", "seeds weights")


def search(lab: Lab) -> None:
    """By itself, as how often it judges is up to it."""
    line = f"finetune bert --precision fp32 --lr 0.01 --epochs 1 --batch-tokens 96 {LABELS} --search --out search"
    lab.ask("search", f"{line} --quiet --json")
    lab.keep_weights("search/final", "search weights")


def tokens(lab: Lab) -> None:
    lab.train("tag", f"{FINETUNE} --task tag --data tags.jsonl --eval tags-dev.jsonl")
    lab.train("crf", f"{FINETUNE} --task tag --crf --data tags.conll --eval tags-dev.conll")
    line = f"{FINETUNE} --task answer --data answer.json --eval answer-dev.json"
    lab.train("answer", f"{line} --max-length 24 --stride 4")
    lab.train("choose", f"{FINETUNE} --task choose --data choose.jsonl --eval choose-dev.jsonl")
    files = {"tag": "tags-dev.jsonl", "crf": "tags-dev.jsonl", "choose": "choose-dev.jsonl"}
    for name, file in (files | {"answer": "answer-dev.json"}).items():
        options = "--n-best 2" if name == "answer" else ""
        lab.ask(f"predict {name}", f"predict {name} {file} -o - --precision fp32 --quiet {options}")
        lab.ask(f"evaluate {name}", f"evaluate {name} {file} --precision fp32 --json --show 1")


def gaps(lab: Lab) -> None:
    """Objectives of one stack of attention, under every mask."""
    lab.run("tokenizer train corpus.txt --size 60 --out tok")
    for name, options in {
        "mlm": "--whole-words --ema 0.9", "nsp": "--ngrams 2 --ngrams 1", "reverse": "--accumulate 2", "prefix": "",
        "unilm": "--recompute", "mlm:0.5,causal:0.25,permutation:0.25": "--across",
    }.items():  # fmt: skip
        lab.train(name.replace(":", "-"), f"{PRETRAIN} {name} --preset bert-tiny {options}")
    lab.train_cut("cut", f"{PRETRAIN} unilm --preset bert-tiny --recompute", 16)
    lab.keep_run("cut", "unilm resumed")
    lab.ask("fill en", "fill mlm --top 3 --json", "red [MASK] runs [MASK]")
    lab.ask("fill zh", "fill nsp --top 3 --json", "北京[MASK]迎你")
    lab.ask("generate prefix", "generate prefix --json --precision fp32 --max-new 6 --text", "北京欢迎")
    line = f"pretrain --from bert {STEPS} --batch-tokens 160 --data corpus.txt --length 24"
    lab.train("more", f"{line} --objective mlm,nsp")


def streams(lab: Lab) -> None:
    """GPT-2, XLNet and ELMo; what they write, and what is learnt from them."""
    lab.run("tokenizer train corpus.txt --size 60 --out tok")
    lab.train("xlnet", f"{PRETRAIN} permutation --preset xlnet-tiny".replace("--max-positions 64 ", ""))
    lab.train("elmo", f"{PRETRAIN} causal,reverse --preset elmo-tiny".replace(SHAPE, "--layers 1 --width 16"))
    lab.run("tokenizer train corpus.txt --kind byte-bpe --size 300 --out bytes")
    lab.train("gpt2", f"{PRETRAIN} causal --preset gpt2 --across".replace("tok ", "bytes "))
    lab.ask("generate xlnet", "generate xlnet --json --precision fp32 --max-new 4 --text", "red cat")
    write = "generate gpt2 --json --precision fp32 --max-new 6"
    lab.ask("generate greedy", f"{write} --text", "北京 red")
    lab.ask("generate beams", f"{write} --beams 3 --n-best 2 --text", "北京 red")
    lab.ask("generate sample", f"{write} --sample --top-k 20 --seed 3 --text", "北京 red")
    lab.ask("stream", f"{write} --sample --top-p 0.9 --seed 5 --stream --text".replace("--json ", ""), "cat")
    for name, options in {"xlnet": "", "elmo": "--freeze --batch-tokens 200", "gpt2": "--lm-weight 0.5"}.items():
        lab.train(f"{name}-labels", f"finetune {name} {STEPS} --batch-tokens 96 {LABELS} {options}")


def pairs(lab: Lab) -> None:
    """Encoder–decoders: pretrained, fine-tuned, and from nothing."""
    lab.run("tokenizer train corpus.txt --kind unigram --size 150 --out tok")
    pretrain = PRETRAIN.replace("--max-positions 64", "--dropout 0").replace("--lr 0.02", "--lr 0.004")
    lab.train("span", f"{pretrain} span --preset t5-small")
    lab.train("mass", f"{pretrain} mass --preset t5-v1.1-small")
    lab.train("mixture", f"{pretrain} mass:0.5,span:0.5 --preset transformer-small")
    line = f"finetune span {STEPS} --lr 0.004 --dropout 0 --batch-tokens 96 --task translate --data write.jsonl"
    lab.train("t5", f"{line} --eval write-dev.jsonl")
    lab.ask("generate t5", "generate t5 --json --precision fp32 --beams 2 --max-new 6 --text", "red cat")
    line = f"train {STEPS} --batch-tokens 96 --vocabulary 60 --layers 1 --width 16 --data write.jsonl"
    line += " --eval write-dev.jsonl --max-target 8 --task"
    lab.train("transformer", f"{line} translate --heads 2 --inner 32 --keep 2 --average 2")
    lab.train("lstm", f"{line} translate --preset lstm-small")
    lab.train("plain", f"{line} title --preset lstm-small-plain")
    lab.run("average transformer --last 2 --out mean")
    lab.keep_weights("mean", "average")
    for name in ("transformer", "lstm", "plain"):
        options = "--min-new 2 --precision fp32 --quiet"
        lab.ask(f"evaluate {name}", f"evaluate {name} zh-dev.jsonl --beams 2 {options} --json")
        lab.ask(f"predict {name}", f"predict {name} write-dev.jsonl -o - {options}")


def images(lab: Lab) -> None:
    short = STEPS.replace("0.02", "0.002") + " --batch-images 12"
    line = f"train --task image {short} --data images.npz"
    lab.train("resnet", f"{line} --preset resnet20 --crop 1 --flip")
    lab.train("plain", f"{line} --preset plain20 --optimiser sgd --schedule cosine --lr 0.0005")
    lab.ask("evaluate", "evaluate resnet images.npz --precision fp32 --json --show 1")
    lab.ask("predict", "predict resnet photos/en -o - --precision fp32 --quiet")
    lab.ask("drift", "drift photos/en photos/zh --json --quiet")
    lab.train("toy", f"train --task gan --preset toy {STEPS} --loss saturating --seed 4")
    lab.train("mlp", f"train --task gan --preset mlp {short} --lr 0.0002 --data images.npz --judge resnet/final --k 2")
    lab.train("dcgan", f"train --task gan --preset dcgan {short} --lr 0.0002 --data images.npz --judge resnet/final")


def vectors(lab: Lab) -> None:
    """What is asked of a model that nobody trained here."""
    for name, options in {"mean": "--normalize", "cls": "--pool cls"}.items():
        lab.run(f"embed bert single.jsonl -o {name}.jsonl --precision fp32 --quiet {options}")
        lab.keep_file(f"{name}.jsonl", f"embed {name}")
    lab.ask("search", "embed bert single.jsonl --json --precision fp32 --quiet --search", "北京")
    drift = "drift corpus.txt corpus-dev.txt --json --quiet --top 2"
    lab.ask("drift ngrams", "drift en.jsonl zh.jsonl --field source --features ngrams --json --quiet", code=7)
    lab.ask("drift embedding", f"{drift} --model bert --precision fp32")
    lab.ask("drift permutation", f"{drift} --features ngrams --test permutation --permutations 19 --folds 2")
    lab.ask("drift numbers", "drift number.jsonl number-dev.jsonl --columns label,id --json --quiet")
    lab.keep(_sizes(lab.run("inspect bert --json --text", "北京欢迎你 red cat")), "signals")


def tools(lab: Lab) -> None:
    for kind, size in {"wordpiece": 60, "bpe": 60, "byte-bpe": 300, "unigram": 150}.items():
        lab.run(f"tokenizer train corpus.txt --kind {kind} --size {size} --out {kind}")
        lab.keep_file(f"{kind}/tokenizer.json", kind, exact=kind != "unigram")  # which has numbers
        line = f"tokenizer show {kind} --json --pair sleeps --text"
        lab.ask(f"show {kind}", line, "red cats, 北京欢迎你?", exact=True)
    lab.run("convert bert --out half --dtype float16")
    lab.keep_weights("half", "convert half")
    lab.run("convert bert --out small --keep-tokens corpus-dev.txt")
    lab.keep_weights("small", "convert small")
    for kind in ("bidirectional", "causal", "reverse", "permutation", "prefix", "packed"):
        lab.ask(f"audit {kind}", f"audit bert --mask {kind} --tokens 6 --json", exact=True)
    for preset in [
        "bert-base",
        "gpt2",
        "t5-small",
        "t5-v1.1-base",
        "transformer-big",
        "xlnet-base",
        "lstm",
        "elmo-small",
    ]:
        lab.keep(_sizes(lab.run(f"inspect --preset {preset} --shapes-only --json")), f"inspect {preset}", exact=True)
    lab.run(f"{FINETUNE} {LABELS} --quiet --out run")
    lab.ask("verify", "verify run --json", exact=True)
    with (lab.folder / "run" / "final" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    lab.ask("verify damaged", "verify run --json", code=4, exact=True)


def _sizes(inspected: str) -> str:
    """Shapes and signals without the names of the modules they are of."""
    told = json.loads(inspected)
    signals = [[row["signal"], row["gradient"]] for row in told["signals"]]
    return json.dumps([told["parameters"], sorted(row["shape"] for row in told["tensors"]), signals])


def masks(lab: Lab) -> None:
    for name, line in {
        "bidirectional": "bidirectional --window 2 --text 北京欢迎你",
        "causal": "causal --text 北京欢迎你 --predict",
        "reverse": "reverse --text 北京欢迎你",
        "permutation": "permutation --text 北京欢迎你 --order 迎京你欢北 --predict",
        "prefix": "prefix --source 你想吃啥 --target 白切鸡",
        "naive": "naive --source 你想吃啥 --target 白切鸡 --layers 2",
        "packed": "packed --text 北京欢迎你 --text hello --each bidirectional",
        "matrix": "matrix --file visible.csv --layers 3",
        "encoder-decoder": "encoder-decoder --source 你想 --target 白切鸡",
    }.items():
        lab.ask(name, f"mask {line}", exact=True)
        lab.ask(f"{name} json", f"mask {line} --json", exact=True)


def coarse(lab: Lab) -> None:
    """int8 and bf16, and T5's dropout, which is drawn otherwise where there is no C compiler: few digits are shared."""
    lab.run(f"{FINETUNE} {PLAIN} --task title --data write.jsonl --max-target 6 --out title --quiet")
    lab.run(f"{FINETUNE} --task classify --data single.jsonl --out single --quiet")
    for precision in ("bf16", "int8"):
        lab.ask(f"predict {precision}", f"predict single single-dev.jsonl -o - --precision {precision} --quiet")
        line = f"generate title --json --precision {precision} --text"
        lab.ask(f"generate {precision}", line, "red cat runs here.")
    lab.run("tokenizer train corpus.txt --kind unigram --size 150 --out tok")
    lab.train("t5-dropout", f"{PRETRAIN} span --preset t5-small --lr 0.002".replace("--max-positions 64", ""))
    lab.train("bf16", f"{FINETUNE} --task classify --data single.jsonl".replace("fp32", "bf16"))


COARSE = ("coarse",)
GROUPS = {
    group.__name__: group
    for group in (titles, labels, several, search, tokens, gaps, streams, pairs, images, vectors, tools, masks, coarse)
}

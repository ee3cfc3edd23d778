#!/usr/bin/env bash
# A stranger's first hour with the wheel: bash tests/stranger/walk.sh dist/nearsay-*.whl
#
# Makes an environment and an empty folder, installs the wheel and uses it as README and
# CONTRIBUTING say. Exits non-zero at the first thing that does not work. With an environment as
# second argument, which has the wheel already, that one is used.
set -euo pipefail

wheel=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH
cd "$folder"

environment=${2:-$folder/environment}
if [ $# -lt 2 ]; then
  python3 -m venv "$environment"
  "$environment/bin/pip" install --quiet "$wheel"
fi
export PATH=$(realpath "$environment")/bin:$PATH

step() { echo "== $*"; }

# runs a command that must work
works() {
  if ! "$@" >out.txt 2>err.txt; then
    echo "failed: $*"; cat out.txt err.txt; exit 1
  fi
}

# refuses CODE WORDS COMMAND...: it must end with this code and one sentence that has the words
refuses() {
  local expected=$1 words=$2 code=0
  shift 2
  "$@" >out.txt 2>err.txt || code=$?
  if [ "$code" != "$expected" ] || ! grep -qF -- "$words" err.txt \
    || grep -qE "Traceback|internal error" err.txt; then
    echo "code $code instead of $expected with '$words': $*"; cat out.txt err.txt; exit 1
  fi
}

has() {
  grep -qF -- "$1" out.txt || { echo "'$1' is not in:"; cat out.txt; exit 1; }
}

step "the wheel holds the package and nothing else"
python -m zipfile --list "$wheel" >files.txt
if grep -qE "^(benchmarks|tests|docs|examples)/|/lab/" files.txt; then
  echo "the wheel holds more:"; cat files.txt; exit 1
fi

step "help without torch"
works nearsay --help
python -X importtime -m nearsay --help >out.txt 2>err.txt
if grep -qE "\| +(torch|numpy|sklearn)$" err.txt; then echo "help imports torch"; exit 1; fi

step "the loss in a plain loop"
works python "$here/loop.py"

step "a loss of one's own"
mkdir mine elsewhere
cp "$here/sce.py" "$here/stripes.py" mine/
cd mine
works nearsay train digits method=sce.py:SCE epochs=4 --out a
works nearsay train digits "method=sce.py:SCE(b=0.5)" epochs=1 --out b
works nearsay train digits method=ncr --set objective.base=sce.py:SCE epochs=1 --out c
works nearsay train digits method=ncr+mixup --set objective.base=sce.py:SCE epochs=1 --out d
refuses 2 "nofile.py" nearsay train digits method=nofile.py:SCE --out x
refuses 2 "Did you mean SCE" nearsay train digits method=sce.py:SEC --out x
refuses 2 "(c=1)" nearsay train digits "method=sce.py:SCE(c=1)" --out x
refuses 2 "objective.function.b=1" nearsay train digits method=sce.py:SCE --set objective.b=1 --out x
cat >wrong.py <<'END'
def scalar(logits, targets):
    return logits.mean()
def no_number(logits, targets):
    return logits.sum(dim=1) * float("nan")
def one(logits):
    return logits.sum(dim=1)
def constant(logits, targets):
    return logits.detach().sum(dim=1)
def failing(logits, targets):
    return logits.no_such_method()
END
echo "def f(:" >syntax.py
refuses 2 "SyntaxError" nearsay train digits method=syntax.py:f --out x
refuses 65 "one loss per row" nearsay train digits method=wrong.py:scalar --out x1
refuses 76 "not finite" nearsay train digits method=wrong.py:no_number --out x2
refuses 2 "two arguments" nearsay train digits method=wrong.py:one --out x3
refuses 65 "gradient" nearsay train digits method=wrong.py:constant --out x4
refuses 70 "line 10 of wrong.py" nearsay train digits method=wrong.py:failing --out x5

step "its run in another folder, without its file"
rm sce.py
cd ../elsewhere
works nearsay audit ../mine/a
works nearsay audit ../mine/c
works nearsay evaluate ../mine/a
works nearsay export ../mine/a
python -c "
from PIL import Image
Image.new('L', (8, 8)).save('digit.png')"
works nearsay predict ../mine/a digit.png
has "digit.png,"

step "a data set of one's own"
cd ../mine
works nearsay train stripes.py:Stripes --dry-run
has "data: 2 classes, inputs of 3 x 8 x 8"
has "examples: 100"
works nearsay train digits data=stripes.py:Stripes --dry-run
has "data: 2 classes, inputs of 3 x 8 x 8"
works nearsay train digits data=stripes.py:Stripes epochs=2 --out e
works nearsay train "stripes.py:Stripes(num_examples=60)" epochs=2 --out f
sed "/def describe/,\$d" stripes.py >plain.py
works nearsay train plain.py:Stripes --dry-run
has "data: 2 classes, inputs of 3 x 8 x 8"
works nearsay train plain.py:Stripes epochs=1 --out g
sed "s/num_classes=2/num_classes=3/" stripes.py >liar.py
refuses 65 "num_classes=2" nearsay train liar.py:Stripes epochs=1 --out x6
sed "s/return Split(images.*/return images, classes/" stripes.py >pair.py
refuses 65 "Split(inputs, Labels(...))" nearsay train pair.py:Stripes epochs=1 --out x7
refuses 2 "must define Nope" nearsay train stripes.py:Nope --dry-run
rm stripes.py plain.py
cd ../elsewhere
works nearsay evaluate ../mine/e
works nearsay evaluate ../mine/g
works nearsay audit ../mine/f

step "the doors from Python"
works python "$here/doors.py"
echo "all of it works"

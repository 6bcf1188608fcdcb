"""What users without longspark_hf do with a drafter from the Hub: `python examples/from_hub.py`.

A saved drafter is a complete repository. It is loaded in a process of its own here, which never imports longspark_hf.
"""

import subprocess
import sys
import tempfile

from longspark_hf import LongSparkDrafter
from longspark_hf.evaluation.demo import SHIPPED_DRAFTER
from longspark_hf.evaluation.targets import source_of


# With a Hub id in place of the folder pass `revision="<commit>"` too, so that the code that runs is the code that you read.
USER = """
import sys
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

source, repository = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source)
target = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
drafter = AutoModel.from_pretrained(repository, trust_remote_code=True, dtype="float32")

inputs = tokenizer("The three primary colours are", return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
print(drafter.stats)
print(f"{type(drafter).__name__} from {type(drafter).__module__}; longspark_hf imported: {'longspark_hf' in sys.modules}")
"""

with tempfile.TemporaryDirectory() as repository:
    # `drafter.push_to_hub("you/your-drafter")` uploads the same files.
    LongSparkDrafter.from_pretrained(SHIPPED_DRAFTER).save_pretrained(repository)
    subprocess.run([sys.executable, "-c", USER, source_of("smollm2"), repository], check=True)

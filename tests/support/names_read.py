"""How many files of models an import of transformers reads to learn their names."""

# Prints the count, and which transformers it is.
PROGRAM = """
import sys
read = []
def look(event, arguments):
    path = str(arguments[0]) if event == "open" else ""
    if "/models/" in path and "/modeling_" in path and path.endswith(".py"):
        read.append(path)
sys.addaudithook(look)
import transformers
print(len(read))
print(transformers.__file__)
assert {"AutoTokenizer", "LlamaForCausalLM", "Gemma3TextConfig"} <= set(dir(transformers))
"""

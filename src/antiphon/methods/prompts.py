"""`ParSerPrompts`: every word that the method says to a model, in one place, with a version to cite beside results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

QUERY_TOOL = "query_agents"

# Written for models of 0.5B to 2B parameters: short sentences, one rule each, examples in the very form of the reply.
WORKER_INSTRUCTIONS = """\
You read one part of a long document and answer a question from this part alone.
If this part answers the question, reply with JSON: "evidence" is a sentence copied exactly from this part, \
"answer" is a short answer that the evidence proves, in the language of the question.
If this part does not answer the question, reply exactly: Unknown
Do not guess. Do not use other knowledge. A similar name is not the same name.

Example part: Mary Holm was born in Bergen in 1902. Her brother Otto was a painter. LIMIT = 40
Question: Where was Mary Holm born?
{"evidence":"Mary Holm was born in Bergen in 1902.","answer":"Bergen"}
Question: What is the value of LIMIT?
{"evidence":"LIMIT = 40","answer":"40"}
Question: When did Mary Holm die?
Unknown
"""

DRIVER_SYSTEM = """\
You answer a question about a long document. You cannot see the document. Agents have read it, each one part of it.
The tool query_agents sends one query to all agents and gives you what they found.

Rules:
1. First call query_agents. Do not answer from memory.
2. Each query asks for one fact only, as a complete question with full names. Agents do not see the user's question.
3. If the question needs two steps, ask for the first fact, read the finding, then ask for the second fact with it.
4. If nobody found it, ask once more in other words.
5. When you know the answer, write only <answer>the answer</answer>: a name, a number, a date or a few words, \
in the language of the user's question.

Example. User: In which country was the director of the film Blue Sand born?
First query: Who directed the film Blue Sand?
Finding: Ana Reyes
Second query: In which country was Ana Reyes born?
Finding: Chile
Then: <answer>Chile</answer>
"""


@dataclass(frozen=True)
class ParSerPrompts:
    """`worker_instructions` come before every shard: one shared prefix.

    `invalid_hint` has a `{reason}`; `last_turn` asks for the answer when no more queries are possible.
    """

    version: str = "parser-1"
    worker_instructions: str = WORKER_INSTRUCTIONS
    driver_system: str = DRIVER_SYSTEM
    invalid_hint: str = (
        "Invalid action: {reason}. Either call query_agents with one query, or write <answer>the answer</answer>."
    )
    ask_first: str = "you have not asked the agents anything yet"
    repeated: str = "This query was asked before. The findings are the same. Ask for something else, or answer."
    too_many: str = "Only the first {max_queries} calls of a turn are made."
    last_turn: str = (
        "No more queries are possible. From the findings so far, now write only <answer>the answer</answer>."
    )
    tool_description: str = "Send one query to all agents. Each agent has read one part of the document."
    query_description: str = "One complete question that asks for one fact, with full names."

    def query_tool(self) -> dict[str, Any]:
        """The declaration of `query_agents` for the chat template of a driver."""
        query = {"type": "string", "description": self.query_description}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        function = {"name": QUERY_TOOL, "description": self.tool_description, "parameters": parameters}
        return {"type": "function", "function": function}

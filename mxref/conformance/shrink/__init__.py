"""From a wrong answer to the clause that it breaks and the smallest request that still shows the fault."""

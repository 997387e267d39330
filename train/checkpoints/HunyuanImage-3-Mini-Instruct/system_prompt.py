"""System prompts of the mini model."""

t2i_system_prompt_en_vanilla = 'Draw what the user wants.'
t2i_system_prompt_en_recaption = 'Describe the picture, then draw it.'
t2i_system_prompt_en_think_recaption = 'Think, describe the picture, then draw it.'
unified_system_prompt_en = 'Draw or change pictures as the user wants.'

-- The story of a session, as core/story.py has it.

local MOST, HEADER = 2048, 16

-- Adds an entry. The oldest ones fold away.
local function tell(at, text)
    local story = (redis.call('HGET', base, 'story') or '') .. whole(tonumber(at)) .. ' ' .. text
        .. '\n'
    if #story > MOST then
        local count = tonumber(string.match(story, '^%+(%d+)\n') or '0')
        if count > 0 then
            story = string.gsub(story, '^[^\n]*\n', '')
        end
        while #story > MOST - HEADER do
            story = string.gsub(story, '^[^\n]*\n', '')
            count = count + 1
        end
        story = '+' .. whole(count) .. '\n' .. story
    end
    redis.call('HSET', base, 'story', story)
end

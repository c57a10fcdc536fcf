-- What every script on one session needs. It is put in front of each of them.
--
-- KEYS[1] is the session's hash. Its other keys begin with the same text, which holds the
-- session's hash tag, so that all of them are in one slot of a cluster; some are known only
-- here (one per stream), so they are not declared.
--
-- Time is an argument. A time to live is only for what nobody comes back for: it runs out
-- MARGIN after the deadline, and nothing is decided by it.

local base = KEYS[1]

-- Seconds. The margin must be longer than a server that went away needs to come back and
-- expire the session itself.
local MARGIN, SLACK = 900, 450

-- A number, to the last bit.
local function exact(number)
    return string.format('%.17g', number)
end

local function whole(number)
    return string.format('%.0f', number)
end

local function seconds(text)
    if text == 'inf' then
        return math.huge
    end
    return tonumber(text)
end

-- Whether a deadline has come at a moment. No other line of a script compares the two. It is done in
-- the atomic step, since the request of another replica may have moved the deadline. Which deadline
-- counts, and when it is, is the rule of core/life.py: scripts get the moment and the new deadline.
local function has_come(deadline, moment)
    return seconds(deadline) <= seconds(moment)
end

-- ARGV says at a place whether there is a value, and then has it; nil: there is none.
local function optional(at)
    return ARGV[at] == '1' and ARGV[at + 1] or nil
end

-- Whether sessions of a mode are named on the wire.
local function is_named(mode)
    return mode == 'transport' or mode == 'protocol'
end

-- The deadline that ARGV has for a mode. From a place on, it has each mode and its deadline.
local function deadline_for(mode, at)
    for i = at, #ARGV, 2 do
        if ARGV[i] == mode then
            return ARGV[i + 1]
        end
    end
end

-- The places of the two deadlines among the fields of a record.
local DEADLINES = { expires = 6, ends = 7 }

-- All that is known of the session but its logs, keys and data; false: it is not there.
-- `known`: what changed its subscriptions last, as the caller knows them. They may be many, and are
-- returned only (else: false) if something else did.
-- `knows_peer`: '1' if the caller knows what its client said of itself, which never changes and may
-- be long: then it is not returned.
local function record(known, knows_peer)
    local fields = redis.call('HMGET', base, 'id', 'mode', 'owner', 'maker', 'created', 'expires',
        'ends', knows_peer == '1' and '-' or 'peer', 'fence', 'conn', 'current', 'opened', 'lists', 'waits', 'statev', 'uris', 'level')
    if not fields[1] then
        return false
    end
    return {
        fields,
        (fields[16] or '') ~= known and redis.call('HKEYS', base .. ':u'),
        redis.call('HGETALL', base .. ':s'),
        redis.call('HGETALL', base .. ':c'),
    }
end

-- The same of a session that goes: with its story.
local function whole_record()
    local found = record()
    if found then
        found[5] = redis.call('HGET', base, 'story')
    end
    return found
end

-- The names of its streams.
local function streams()
    local names = {}
    for _, field in ipairs(redis.call('HKEYS', base)) do
        names[#names + 1] = string.match(field, '^l:(.*)$')
    end
    return names
end

local function keys()
    local all = { base }
    for _, suffix in ipairs({ ':u', ':s', ':c', ':d', ':q', ':qf', ':qa', ':r' }) do
        all[#all + 1] = base .. suffix
    end
    for _, stream in ipairs(streams()) do
        all[#all + 1] = base .. ':e:' .. stream
        all[#all + 1] = base .. ':k:' .. stream
    end
    return all
end

-- Lua hands over a few thousand values at once and no more, and a session may have more keys.
local CHUNK = 1000

local function delete()
    local all = keys()
    for first = 1, #all, CHUNK do
        redis.call('UNLINK', unpack(all, first, math.min(first + CHUNK - 1, #all)))
    end
end

-- The session ends: its record with its story, and the tokens of its subscriptions.
local function leave()
    local found, tokens = whole_record(), redis.call('HGETALL', base .. ':u')
    delete()
    return { 'over', found, tokens }
end

-- A key that was just made goes when its session goes.
local function share_lifetime(key)
    local left = redis.call('PTTL', base)
    if left > 0 then
        redis.call('PEXPIRE', key, left)
    end
end

-- The session was used: its idle deadline is a later one, but never later than `ends`, which is known
-- here only. The new deadline, as text.
local function move_deadline(now, deadline, ends)
    local expires = math.min(seconds(deadline), seconds(ends))
    if expires == math.huge then
        return 'inf'
    end
    redis.call('HSET', base, 'expires', exact(expires))
    -- Not every time: there are many keys, and the margin is long.
    local covered = tonumber(redis.call('HGET', base, 'covered') or '-1')
    if covered < 0 or not has_come(expires, covered + SLACK) then
        local left = whole((expires - now + MARGIN) * 1000)
        redis.call('HSET', base, 'covered', exact(expires))
        for _, key in ipairs(keys()) do
            redis.call('PEXPIRE', key, left)
        end
    end
    return exact(expires)
end

-- The answer of each session that KEYS names. What the other parts of a script do is on that one
-- meanwhile. If another program damaged it, `or_else` is called, and the answer is 'broken'.
local function of_each(answer, or_else)
    local answers = {}
    for at, name in ipairs(KEYS) do
        base = name
        local succeeded, found = pcall(answer)
        if not succeeded and or_else then
            or_else()
        end
        answers[at] = succeeded and found or not succeeded and 'broken'
    end
    return answers
end

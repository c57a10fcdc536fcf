-- needs: session log keys
-- ARGV: now; then lists, each after its length: fields of the record, of the state, of the
-- subscriptions, of what its GET stream carries; the data, or nothing; logs and their events; keys.
--
-- The place in the lists of the session that has this id already; or true: it is added.
local at = 1

local function take()
    at = at + 1
    return ARGV[at - 1]
end

local function take_optional()
    local is_there = take() == '1'
    local value = take()
    return is_there and value
end

local now = tonumber(take())
if redis.call('EXISTS', base) == 1 then
    return redis.call('HGET', base, 'member') or ''
end
for _, suffix in ipairs({ '', ':s', ':u', ':c' }) do
    for _ = 1, tonumber(take()) do
        redis.call('HSET', base .. suffix, take(), take())
    end
end
local data = take_optional()
if data then
    redis.call('SET', base .. ':d', data)
end
for _ = 1, tonumber(take()) do
    local log = new_log(take(), take())
    log.head, log.floor, log.evicted = tonumber(take()), tonumber(take()), tonumber(take())
    for _ = 1, tonumber(take()) do
        local number, entry = tonumber(take()), { 't', take(), 'p', take() }
        local key, origin, name = take_optional(), take_optional(), take_optional()
        for member, value in pairs({ k = key, o = origin, c = name }) do
            if value then
                entry[#entry + 1], entry[#entry + 2] = member, value
            end
        end
        local payload = entry[4]
        redis.call('XADD', log.events, id_of(number), unpack(entry))
        if key then
            redis.call('HSET', log.by_key, identity(origin or nil, key),
                whole(number) .. ' ' .. #payload)
        end
        log.count, log.bytes = log.count + 1, log.bytes + #payload
    end
    save(log)
end
local count = tonumber(take())
if count > 0 then
    local all = open_keys('0', '0')
    for _ = 1, count do
        local key = take()
        local entry = {
            cost = tonumber(take()), digest = take(), runner = take(), run = take(),
            scopes = take(), at = tonumber(take()), state = take(), kept = 0,
        }
        local answer = take()
        if entry.state ~= 'running' then
            all.finished = all.finished + 1
            redis.call('ZADD', finished, all.finished, key)
        end
        if entry.state == 'answered' then
            entry.kept = #answer
            redis.call('HSET', entries, 'a:' .. key, answer)
            redis.call('ZADD', answered, all.finished, key)
        end
        put_key(key, entry)
        all.bytes, all.answers = all.bytes + entry.cost + entry.kept, all.answers + entry.kept
    end
    save_keys(all)
end
local times = redis.call('HMGET', base, 'expires', 'ends')
move_deadline(now, times[1], times[2])
return true
